{{/* The configuration files of `serve` and `batch`, from values: one key a line. */}}

{{/* One key; nothing for a value that is not given. Whole numbers come from YAML as floats, and must not be printed as 4e+06. */}}
{{- define "smcserve.key" -}}
{{- $value := index . 1 -}}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) -}}{{- $value = int64 $value -}}{{- end -}}
{{- if not (or (kindIs "invalid" $value) (and (kindIs "string" $value) (eq $value ""))) }}
{{ index . 0 }}: {{ toJson $value }}
{{- end -}}
{{- end -}}

{{/* The keys that the chart sets, and those of `config`, which must be others. Arguments: keys, config, where. */}}
{{- define "smcserve.keys" -}}
{{- $own := list -}}
{{- range .keys -}}
{{- $own = append $own (index . 0) -}}
{{- include "smcserve.key" . -}}
{{- end -}}
{{- $where := .where -}}
{{- range $key, $value := .config -}}
{{- if has ($key | replace "_" "-") $own -}}
{{- fail (printf "%s.%s: the chart writes this key itself; give the value of the chart that it comes from" $where $key) -}}
{{- end -}}
{{- include "smcserve.key" (list $key $value) -}}
{{- end -}}
{{- end -}}

{{/* What `serve` and `batch` have in common: a list of keys and values, as JSON. */}}
{{- define "smcserve.workerGroupKeys" -}}
{{- $v := .Values -}}
{{- $keys := list
  (list "target" (include "smcserve.modelPath" (dict "root" . "side" "target"))) (list "draft" (include "smcserve.modelPath" (dict "root" . "side" "draft"))) (list "target-tp" $v.target.tp) (list "draft-tp" $v.draft.tp)
  (list "placement" $v.placement) (list "device" $v.device) (list "dtype" $v.dtype) (list "target-dtype" $v.target.dtype)
  (list "draft-dtype" $v.draft.dtype) (list "form" $v.engine.form) (list "block" $v.engine.block)
  (list "branches" $v.engine.branches) (list "micro-batches" $v.engine.microBatches)
  (list "max-slots" $v.engine.maxSlots) (list "max-chains" $v.engine.maxChains) (list "max-context" $v.engine.maxContext) (list "pages" $v.engine.pages)
  (list "prefill-chunk" $v.engine.prefillChunk) (list "prefill-share" $v.engine.prefillShare) (list "no-prefix-cache" (not $v.engine.prefixCache))
  (list "threads" $v.engine.threads) (list "link" $v.link)
  (list "start-timeout" $v.timeouts.start) (list "link-timeout" $v.timeouts.link) (list "heartbeat" $v.timeouts.heartbeat)
-}}
{{- if eq $v.topology "cluster" -}}
{{- $keys = concat $keys (list (list "draft-resource" "smc_draft") (list "target-resource" "smc_target")) -}}
{{- end -}}
{{- toJson $keys -}}
{{- end -}}

{{- define "smcserve.serveConfig" -}}
{{- $v := .Values -}}
{{- $http := include "smcserve.httpPort" . | int -}}
{{- $keys := list
  (list "host" "0.0.0.0") (list "port" $v.gateway.port) (list "http-port" (ternary $http "" (ne $http 0))) (list "no-http" (ternary "" true (ne $http 0))) (list "metrics-port" $v.gateway.metricsPort)
  (list "worker-groups" $v.workerGroups) (list "max-queue" $v.engine.maxQueue) (list "max-queue-pages" $v.engine.maxQueuePages) (list "drain-timeout" $v.gateway.drainTimeout)
-}}
{{- $cert := ternary "/etc/smcserve/tls/tls.crt" "" (not (empty $v.tls.secret)) -}}
{{- $key := ternary "/etc/smcserve/tls/tls.key" "" (not (empty $v.tls.secret)) -}}
{{- $authority := ternary "/etc/smcserve/client-ca/ca.crt" "" (not (empty $v.tls.clientCaSecret)) -}}
{{- $tokens := ternary (printf "/etc/smcserve/tokens/%s" $v.auth.tokensKey) "" (not (empty $v.auth.tokensSecret)) -}}
{{- $keys = concat $keys (list (list "tls-cert" $cert) (list "tls-key" $key) (list "tls-client-ca" $authority) (list "auth-token-file" $tokens)) -}}
{{- include "smcserve.keys" (dict "keys" (concat (include "smcserve.workerGroupKeys" . | fromJsonArray) $keys) "config" $v.gateway.config "where" "gateway.config") | trim -}}
{{- end -}}

{{- define "smcserve.batchConfig" -}}
{{- include "smcserve.keys" (dict "keys" (include "smcserve.workerGroupKeys" . | fromJsonArray) "config" .Values.batch.config "where" "batch.config") | trim -}}
{{- end -}}

{{/* A file that differs has another name, so that an upgrade does not change it under a running pod. Arguments: root, command. */}}
{{- define "smcserve.configSuffix" -}}
{{- .command }}-{{ include (printf "smcserve.%sConfig" .command) .root | sha256sum | trunc 8 -}}
{{- end -}}

{{/* Arguments: root, command. */}}
{{- define "smcserve.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "smcserve.metadata" (dict "root" .root "suffix" (include "smcserve.configSuffix" .)) | nindent 2 }}
immutable: true
data:
  {{ .command }}.yaml: |
    {{- include (printf "smcserve.%sConfig" .command) .root | nindent 4 }}
{{- end -}}

{{/* Arguments: command. */}}
{{- define "smcserve.configFlag" -}}
--config=/etc/smcserve/config/{{ .command }}.yaml
{{- end -}}

{{- define "smcserve.configMount" -}}
- {name: config, mountPath: /etc/smcserve/config, readOnly: true}
{{- end -}}

{{/* Arguments: root, command. */}}
{{- define "smcserve.configVolume" -}}
- name: config
  configMap: {name: {{ include "smcserve.name" .root }}-{{ include "smcserve.configSuffix" . }}}
{{- end -}}

{{/* True if the batch reads or writes files in its volume. */}}
{{- define "smcserve.batchFiles" -}}
{{- if or (hasPrefix "/" .Values.batch.input) (hasPrefix "/" .Values.batch.output) -}}true{{- end -}}
{{- end -}}

{{/* True if it reads or writes an object store. */}}
{{- define "smcserve.batchStored" -}}
{{- if not (and (hasPrefix "/" .Values.batch.input) (hasPrefix "/" .Values.batch.output)) -}}true{{- end -}}
{{- end -}}

{{/* Ray runs it in a shell. */}}
{{- define "smcserve.batchCommand" -}}
smcserve batch {{ squote .Values.batch.input }} {{ squote .Values.batch.output }} {{ include "smcserve.configFlag" (dict "command" "batch") }}
{{- end -}}
