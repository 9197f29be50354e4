{{/* What the pods of both topologies have in common. */}}

{{/* Arguments: root, place (with nodeSelector, tolerations, affinity). */}}
{{- define "smcserve.podCommon" -}}
{{- $v := .root.Values -}}
serviceAccountName: {{ include "smcserve.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml $v.podTemplate.securityContext | nindent 2 }}
{{- with $v.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .place.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Arguments: root, component. */}}
{{- define "smcserve.podMetadata" -}}
labels:
  {{- include "smcserve.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "smcserve.container" -}}
image: {{ include "smcserve.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  {{- toYaml .Values.podTemplate.containerSecurityContext | nindent 2 }}
{{- end -}}

{{/* A command that carries its script, so that an upgrade does not change it under a running pod. Arguments: root, name. */}}
{{- define "smcserve.script" -}}
- bash
- -c
- {{ .root.Files.Get (printf "files/scripts/%s" .name) | toJson }}
- {{ .name }}
{{- end -}}

{{/* Everything that is written goes to /tmp. */}}
{{- define "smcserve.env" -}}
- {name: HOME, value: /tmp}
- {name: PYTHONDONTWRITEBYTECODE, value: "1"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of containers on the RayCluster of a job, whose token KubeRay gives to all of them. */}}
{{- define "smcserve.jobEnv" -}}
- {name: RAY_AUTH_MODE, value: {{ .Values.ray.auth.mode }}}
{{ include "smcserve.env" . }}
{{- end -}}

{{/* Of containers on the RayCluster of the service: KubeRay would not give the token to the gateway. */}}
{{- define "smcserve.rayEnv" -}}
{{- if eq .Values.ray.auth.mode "token" -}}
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ default (include "smcserve.name" .) .Values.ray.auth.secret }}, key: auth_token}
{{ end -}}
{{- include "smcserve.jobEnv" . }}
{{- end -}}

{{- define "smcserve.baseMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- end -}}

{{/* Arguments: root, shm. */}}
{{- define "smcserve.baseVolumes" -}}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .shm }}}
{{- end -}}

{{- define "smcserve.modelMounts" -}}
{{- if .Values.models.volume }}
- {name: models, mountPath: {{ .Values.models.mountPath }}, readOnly: true}
{{- end }}
{{- if eq .Values.device "cuda" }}
- {name: triton, mountPath: /opt/smcserve/triton}
{{- end }}
{{- end -}}

{{- define "smcserve.modelVolumes" -}}
{{- with .Values.models.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if eq .Values.device "cuda" }}
- name: triton
  emptyDir: {}
{{- end }}
{{- end -}}

{{/* Triton writes kernels beside the part that the image brings ready-made, because it has no C compiler. */}}
{{- define "smcserve.tritonInit" -}}
{{- if eq .Values.device "cuda" }}
initContainers:
  - name: triton
    {{- include "smcserve.container" . | nindent 4 }}
    command: [cp, -R, /opt/smcserve/triton/., /triton/]
    resources:
      requests: {cpu: 10m, memory: 32Mi}
      limits: {cpu: "1", memory: 64Mi}
    volumeMounts:
      - {name: triton, mountPath: /triton}
{{- end }}
{{- end -}}
