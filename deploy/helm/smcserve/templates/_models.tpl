{{/* Model directories and downloads. `source` of a model is one of: huggingFace, http, s3 (downloaded into models.volume),
persistentVolumeClaim, image (mounted). */}}

{{/* The model's source as {kind: .., ..}; empty for a model that is already in the image or on models.volume. Arguments: root, side. */}}
{{- define "smcserve.source" -}}
{{- range $kind, $source := (index .root.Values.models .side).source -}}
{{- merge (dict "kind" $kind) $source | toYaml -}}
{{- end -}}
{{- end -}}

{{/* True if the model is downloaded. Arguments: root, side. */}}
{{- define "smcserve.downloaded" -}}
{{- $source := include "smcserve.source" . | fromYaml -}}
{{- if has (default "" $source.kind) (list "huggingFace" "http" "s3") -}}true{{- end -}}
{{- end -}}

{{/* Directory of a model in every pod. The directory of a download depends on its source, so that a new source never uses old files.
Arguments: root, side. */}}
{{- define "smcserve.modelPath" -}}
{{- $models := .root.Values.models -}}
{{- $source := include "smcserve.source" . | fromYaml -}}
{{- if include "smcserve.downloaded" . -}}
{{ $models.mountPath }}/{{ .side }}-{{ omit $source "tokenSecret" "tokenKey" "credentialsSecret" "endpoint" "region" | toJson | sha256sum | trunc 12 }}
{{- else if $source.kind -}}
{{ $models.mountPath }}-{{ .side }}{{ with $source.directory }}/{{ . }}{{ end }}
{{- else -}}
{{ (index $models .side).path }}
{{- end -}}
{{- end -}}

{{/* Volume mounts of the models. Arguments: root. */}}
{{- define "smcserve.modelMounts" -}}
{{- $models := .root.Values.models -}}
{{- if $models.volume }}
- {name: models, mountPath: {{ $models.mountPath }}, readOnly: true}
{{- end }}
{{- range $side := list "target" "draft" }}
{{- $source := include "smcserve.source" (dict "root" $.root "side" $side) | fromYaml }}
{{- if has (default "" $source.kind) (list "persistentVolumeClaim" "image") }}
- {name: model-{{ $side }}, mountPath: {{ $models.mountPath }}-{{ $side }}, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{/* Volumes of the models. Arguments: root. */}}
{{- define "smcserve.modelVolumes" -}}
{{- with .root.Values.models.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $side := list "target" "draft" }}
{{- $source := include "smcserve.source" (dict "root" $.root "side" $side) | fromYaml }}
{{- if eq (default "" $source.kind) "persistentVolumeClaim" }}
- name: model-{{ $side }}
  persistentVolumeClaim: {claimName: {{ $source.claimName }}, readOnly: true}
{{- else if eq (default "" $source.kind) "image" }}
- name: model-{{ $side }}
  image: {reference: {{ $source.reference | quote }}, pullPolicy: {{ default "IfNotPresent" $source.pullPolicy }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Init container that waits until downloads are complete and checked. Arguments: root, pod. */}}
{{- define "smcserve.modelsInit" -}}
{{- $paths := list -}}
{{- range $side := list "target" "draft" -}}
{{- $of := dict "root" $.root "side" $side -}}
{{- if include "smcserve.downloaded" $of -}}
{{- $paths = append $paths (include "smcserve.modelPath" $of) -}}
{{- end -}}
{{- end -}}
{{- if $paths }}
- name: models
  {{- include "smcserve.container" . | nindent 2 }}
  command:
    {{- include "smcserve.script" (dict "root" .root "name" "wait-models.sh") | nindent 4 }}
    {{- toYaml $paths | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {cpu: "1", memory: 64Mi}
  volumeMounts:
    - {name: models, mountPath: {{ .root.Values.models.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* Arguments of the download job: JSON for every downloaded model. Arguments: root. */}}
{{- define "smcserve.downloads" -}}
{{- range $side := list "target" "draft" }}
{{- $of := dict "root" $.root "side" $side }}
{{- if include "smcserve.downloaded" $of }}
{{- $source := include "smcserve.source" $of | fromYaml }}
- {{ omit $source "tokenSecret" "tokenKey" "credentialsSecret" | merge (dict "side" $side "directory" (include "smcserve.modelPath" $of)) | toJson | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Credentials of the sources: environment variables prefixed by TARGET_ or DRAFT_. Arguments: root. */}}
{{- define "smcserve.downloadSecrets" -}}
{{- range $side := list "target" "draft" }}
{{- $source := include "smcserve.source" (dict "root" $.root "side" $side) | fromYaml }}
{{- with $source.tokenSecret }}
- name: {{ upper $side }}_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ default "token" $source.tokenKey }}}
{{- end }}
{{- with $source.credentialsSecret }}
{{- $secret := . }}
{{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" "AWS_SESSION_TOKEN" }}
- name: {{ upper $side }}_{{ . }}
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: {{ . }}, optional: {{ eq . "AWS_SESSION_TOKEN" }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Spec of the download Job. Arguments: root, pod, downloads. */}}
{{- define "smcserve.downloadSpec" -}}
{{- $v := .root.Values -}}
# A pod that is lost or finds a broken file is replaced by one that resumes the download.
backoffLimit: {{ $v.models.download.retries }}
activeDeadlineSeconds: {{ $v.models.download.timeout }}
template:
  metadata:
    {{- include "smcserve.podMetadata" (merge (dict "component" "models") .) | nindent 4 }}
  spec:
    {{- include "smcserve.podCommon" . | nindent 4 }}
    restartPolicy: Never
    containers:
      - name: download
        {{- include "smcserve.container" . | nindent 8 }}
        command:
          - python
          - -c
          - {{ .root.Files.Get "files/scripts/fetch_models.py" | toJson }}
        args:
          {{- toYaml .downloads | nindent 10 }}
        env:
          {{- include "smcserve.env" . | nindent 10 }}
          {{- include "smcserve.downloadSecrets" . | nindent 10 }}
        resources:
          {{- include "smcserve.withStorage" (dict "root" .root "resources" $v.models.download.resources) | nindent 10 }}
        volumeMounts:
          {{- include "smcserve.baseMounts" . | nindent 10 }}
          - {name: models, mountPath: {{ $v.models.mountPath }}}
    volumes:
      {{- include "smcserve.baseVolumes" (merge (dict "shm" "64Mi") .) | nindent 6 }}
      - name: models
        {{- toYaml $v.models.volume | nindent 8 }}
{{- end -}}
