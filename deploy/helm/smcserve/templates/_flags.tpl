{{/* Command-line flags from values, one per line. */}}

{{/* One flag; empty for a missing value. Integers come from YAML as floats and must not be printed as 4e+06. */}}
{{- define "smcserve.flag" -}}
{{- $value := index . 1 -}}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) -}}{{- $value = int64 $value -}}{{- end -}}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}
--{{ index . 0 }}={{ $value }}
{{- end -}}
{{- end -}}

{{/* Flags that `serve` and `batch` share. */}}
{{- define "smcserve.gangFlags" -}}
{{- $v := .Values -}}
{{- $flags := list
  (list "target" (include "smcserve.modelPath" (dict "root" . "side" "target"))) (list "draft" (include "smcserve.modelPath" (dict "root" . "side" "draft"))) (list "target-tp" $v.target.tp) (list "draft-tp" $v.draft.tp)
  (list "device" $v.device) (list "dtype" $v.dtype) (list "target-dtype" $v.target.dtype)
  (list "draft-dtype" $v.draft.dtype) (list "form" $v.engine.form) (list "block" $v.engine.block)
  (list "branches" $v.engine.branches) (list "cohorts" $v.engine.cohorts)
  (list "max-slots" $v.engine.maxSlots) (list "max-chains" $v.engine.maxChains) (list "max-context" $v.engine.maxContext) (list "pages" $v.engine.pages)
  (list "prefill-chunk" $v.engine.prefillChunk) (list "prefill-share" $v.engine.prefillShare) (list "threads" $v.engine.threads) (list "link" $v.link)
  (list "start-timeout" $v.timeouts.start) (list "link-timeout" $v.timeouts.link) (list "heartbeat" $v.timeouts.heartbeat)
-}}
{{- if eq $v.topology "cluster" -}}
{{- $flags = concat $flags (list (list "draft-resource" "smc_draft") (list "target-resource" "smc_target")) -}}
{{- end -}}
{{- range $flags -}}{{- include "smcserve.flag" . -}}{{- end -}}
{{- if not $v.engine.prefixCache }}
--no-prefix-cache
{{- end -}}
{{- end -}}

{{- define "smcserve.serveFlags" -}}
{{- $v := .Values -}}
{{- $flags := list
  (list "host" "0.0.0.0") (list "port" $v.gateway.port) (list "http-port" $v.gateway.httpPort) (list "metrics-port" $v.gateway.metricsPort)
  (list "max-queue" $v.engine.maxQueue) (list "max-queue-pages" $v.engine.maxQueuePages) (list "drain-timeout" $v.gateway.drainTimeout)
-}}
{{- if $v.tls.secret -}}
{{- $flags = concat $flags (list (list "tls-cert" "/etc/smcserve/tls/tls.crt") (list "tls-key" "/etc/smcserve/tls/tls.key")) -}}
{{- end -}}
{{- if $v.tls.clientCaSecret -}}
{{- $flags = append $flags (list "tls-client-ca" "/etc/smcserve/client-ca/ca.crt") -}}
{{- end -}}
{{- if $v.auth.tokensSecret -}}
{{- $flags = append $flags (list "auth-token-file" (printf "/etc/smcserve/tokens/%s" $v.auth.tokensKey)) -}}
{{- end -}}
{{- include "smcserve.gangFlags" . -}}
{{- range $flags -}}{{- include "smcserve.flag" . -}}{{- end -}}
{{- range $v.gateway.extraArgs }}
{{ . }}
{{- end -}}
{{- end -}}

{{- define "smcserve.serveArgs" -}}
{{- range include "smcserve.serveFlags" . | trim | splitList "\n" }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Command of the batch job, quoted for the shell in which Ray runs it. */}}
{{- define "smcserve.batchCommand" -}}
smcserve batch {{ squote .Values.batch.input }} {{ squote .Values.batch.output }}
{{- range concat (include "smcserve.gangFlags" . | trim | splitList "\n") .Values.batch.extraArgs }} {{ squote . }}{{ end -}}
{{- end -}}
