{{/* Names, labels, the image and durations. */}}

{{- define "smcserve.name" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "smcserve.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "smcserve.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{ include "smcserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Metadata of an object other than a pod. Arguments: root; optional: suffix of the name, labels, annotations. */}}
{{- define "smcserve.metadata" -}}
name: {{ include "smcserve.name" .root }}{{ with .suffix }}-{{ . }}{{ end }}
labels:
  {{- include "smcserve.labels" .root | nindent 2 }}
  {{- with merge (dict) (default dict .labels) .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Selector labels of the pods that receive calls. */}}
{{- define "smcserve.gatewaySelector" -}}
{{- if eq .Values.topology "cluster" -}}
ray.io/cluster: {{ include "smcserve.name" . }}
ray.io/node-type: head
{{- else -}}
{{ include "smcserve.selector" . }}
app.kubernetes.io/component: replica
{{- end -}}
{{- end -}}

{{- define "smcserve.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default (printf "%s-%s" $.Chart.AppVersion $.Values.device) .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "smcserve.serviceAccount" -}}
{{- default (ternary (include "smcserve.name" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* Number of GPUs for the draft or the target of a worker group; 0 on CPUs, and for a draft that is on the target's GPUs. Arguments: root, side. */}}
{{- define "smcserve.gpus" -}}
{{- $group := index .root.Values .side -}}
{{- if and (eq .root.Values.device "cuda") (not (and (eq .side "draft") (eq .root.Values.placement "shared"))) -}}{{ default (default 1 $group.tp) $group.gpus | int }}{{- else -}}0{{- end -}}
{{- end -}}

{{/* Seconds that a pod needs to stop: preStop, drain, delivery of statuses and the end of all processes. */}}
{{- define "smcserve.drain" -}}
{{- add (ceil .Values.gateway.preStopDelay) (ceil .Values.gateway.drainTimeout) 20 -}}
{{- end -}}

{{- define "smcserve.gracePeriod" -}}
{{- $needed := add (include "smcserve.drain" . | int) 15 -}}
{{- $given := .Values.gateway.terminationGracePeriod -}}
{{- if and $given (lt (int64 $given) (int64 $needed)) -}}
{{- fail (printf "gateway.terminationGracePeriod=%v; allowed: at least %v, which is what preStopDelay and drainTimeout take, plus 35" $given $needed) -}}
{{- end -}}
{{- default $needed $given | int64 -}}
{{- end -}}
