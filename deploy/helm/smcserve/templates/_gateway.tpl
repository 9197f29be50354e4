{{/* Gateway container: ports, probes, certificates and tokens. */}}

{{/* Of OpenAI's API; empty: none, as where the router has it. */}}
{{- define "smcserve.httpPort" -}}
{{- if not .Values.router.enabled -}}
{{- with .Values.gateway.httpPort -}}{{ int . }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "smcserve.gatewayPorts" -}}
- {name: grpc, containerPort: {{ .Values.gateway.port }}}
{{- with include "smcserve.httpPort" . }}
- {name: http, containerPort: {{ . }}}
{{- end }}
- {name: smc-metrics, containerPort: {{ .Values.gateway.metricsPort }}}
{{- end -}}

{{- define "smcserve.checkPorts" -}}
{{- $gateway := .Values.gateway -}}
{{- $taken := dict -}}
{{- range $name := list "port" "httpPort" "metricsPort" -}}
{{- with index $gateway $name -}}
{{- if hasKey $taken (toString .) -}}
{{- fail (printf "gateway.%s=%v is given as gateway.%s as well; give another one" $name . (get $taken (toString .))) -}}
{{- end -}}
{{- $_ := set $taken (toString .) $name -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "smcserve.serverName" -}}
{{- default (printf "%s.%s.svc" (include "smcserve.name" .) .Release.Namespace) .Values.tls.serverName -}}
{{- end -}}

{{/* Health probe. The kubelet's gRPC probe does not support TLS; with TLS the command-line client is used, with a host name of the certificate. */}}
{{- define "smcserve.healthProbe" -}}
{{- $v := .Values -}}
{{- if $v.tls.secret -}}
exec:
  command:
    - smcserve
    - client
    - health
    - --address={{ include "smcserve.serverName" . }}:{{ $v.gateway.port }}
    - --tls-ca={{ ternary "/etc/smcserve/ca" "/etc/smcserve/tls" (not (empty $v.tls.caSecret)) }}/ca.crt
    {{- if $v.tls.probeSecret }}
    - --tls-cert=/etc/smcserve/probe/tls.crt
    - --tls-key=/etc/smcserve/probe/tls.key
    {{- end }}
timeoutSeconds: 15
{{- else -}}
grpc:
  port: {{ $v.gateway.port }}
timeoutSeconds: 5
{{- end }}
{{- end -}}

{{/* Probes. A gateway is alive if it listens. Lost workers are no reason to restart it, because it restarts them itself. */}}
{{- define "smcserve.gatewayProbes" -}}
startupProbe:
  {{- if and (include "smcserve.httpPort" . | int) (not .Values.tls.secret) }}
  # What it says is among the events of the pod: how far the start is.
  exec:
    command:
      - python
      - -c
      - {{ .Files.Get "files/scripts/startup_probe.py" | toJson }}
      - {{ include "smcserve.httpPort" . | quote }}
  timeoutSeconds: 5
  {{- else }}
  {{- include "smcserve.healthProbe" . | nindent 2 }}
  {{- end }}
  periodSeconds: 10
  failureThreshold: {{ add (ceil (divf .Values.timeouts.start 10)) 12 }}
readinessProbe:
  {{- include "smcserve.healthProbe" . | nindent 2 }}
  periodSeconds: {{ ternary 15 5 (not (empty .Values.tls.secret)) }}
  failureThreshold: 2
livenessProbe:
{{- if .Values.tls.secret }}
  tcpSocket:
    port: {{ .Values.gateway.port }}
{{- else }}
  grpc:
    port: {{ .Values.gateway.port }}
    service: smc.gateway
{{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "smcserve.gatewayLifecycle" -}}
{{- with .Values.gateway.preStopDelay }}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ . | quote }}]
{{- end }}
{{- end -}}

{{- define "smcserve.secretMounts" -}}
{{- range $name, $secret := include "smcserve.secrets" . | fromYaml }}
- {name: {{ $name }}, mountPath: /etc/smcserve/{{ $name }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "smcserve.secretVolumes" -}}
{{- range $name, $secret := include "smcserve.secrets" . | fromYaml }}
- name: {{ $name }}
  secret: {secretName: {{ $secret }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* Folder under /etc/smcserve -> Secret mounted there. */}}
{{- define "smcserve.secrets" -}}
{{- with .Values -}}
{{- $all := dict "tls" .tls.secret "client-ca" .tls.clientCaSecret "ca" .tls.caSecret "probe" .tls.probeSecret "tokens" .auth.tokensSecret -}}
{{- range $name, $secret := $all }}
{{- if $secret }}
{{ $name }}: {{ $secret }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The secrets that a caller needs, in the format of smcserve.secrets. */}}
{{- define "smcserve.clientSecrets" -}}
{{- $all := include "smcserve.secrets" . | fromYaml -}}
{{- omit $all "client-ca" (ternary "ca" "tls" (not (hasKey $all "ca"))) | toYaml -}}
{{- end -}}

{{/* Host name of the certificate for 127.0.0.1, so that probes can verify it. */}}
{{- define "smcserve.hostAliases" -}}
{{- if .Values.tls.secret }}
hostAliases:
  - ip: 127.0.0.1
    hostnames: [{{ include "smcserve.serverName" . }}]
{{- end }}
{{- end -}}
