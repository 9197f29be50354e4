{{/* smg, the router in front of the replicas of topology `pod`. */}}

{{- define "smcserve.routerImage" -}}
{{- with .Values.router.image -}}
{{ default $.Values.image.repository .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ default (printf "%s-router" $.Chart.AppVersion) .tag }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "smcserve.routerSelector" -}}
{{ include "smcserve.selector" . }}
app.kubernetes.io/component: router
{{- end -}}

{{- define "smcserve.routerArgs" -}}
{{- $v := .Values -}}
- --host=0.0.0.0
- --port={{ $v.router.port }}
- --prometheus-port={{ $v.router.metricsPort }}
- --health-check-port={{ $v.router.healthPort }}
- --backend=vllm
- --policy={{ $v.router.policy }}
- --service-discovery
- --service-discovery-namespace={{ .Release.Namespace }}
- --service-discovery-port={{ $v.gateway.port }}
- --selector
{{- range $label, $value := include "smcserve.gatewaySelector" . | fromYaml }}
- {{ printf "%s=%s" $label $value }}
{{- end }}
- --health-check-interval-secs={{ $v.router.healthInterval }}
- --worker-startup-timeout-secs={{ ceil $v.timeouts.start }}
- --shutdown-grace-period-secs={{ $v.router.drainTimeout }}
{{- range $v.router.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Settings of the router's pod. Routers are spread over nodes, unless the values have constraints of their own. */}}
{{- define "smcserve.routerPod" -}}
{{- $pod := include "smcserve.podTemplate" (dict "root" . "own" .Values.router.podTemplate) | fromYaml -}}
{{- if not $pod.topologySpreadConstraints -}}
{{- $labels := dict "matchLabels" (include "smcserve.routerSelector" . | fromYaml) -}}
{{- $spread := dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" "labelSelector" $labels -}}
{{- $_ := set $pod "topologySpreadConstraints" (list $spread) -}}
{{- end -}}
{{- toYaml $pod -}}
{{- end -}}

{{- define "smcserve.checkRouter" -}}
{{- $v := .Values -}}
{{- if $v.router.enabled -}}
{{- if ne $v.topology "pod" -}}
{{- fail "router.enabled=true with topology=cluster, which has one replica a release; use topology=pod, which has as many as wanted" -}}
{{- end -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "gateway.httpPort") "where" "router.enabled=true, whose own port has OpenAI's API,") -}}
{{- if not $v.router.controlKeySecret -}}
{{- fail "router.controlKeySecret is empty; give a Secret with `key`, or every client that reaches the router could send its callers elsewhere" -}}
{{- end -}}
{{- if $v.tls.secret -}}
{{- fail "router.enabled=true with tls.secret; smg speaks plain text to the replicas: leave tls.secret out, close the replicas' port by networkPolicy, and encrypt at an Ingress or a route" -}}
{{- end -}}
{{- end -}}
{{- end -}}
