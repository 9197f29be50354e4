{{/* Parts shared by all pods. Argument `pod`: the merged settings of smcserve.podTemplate. */}}

{{/* Settings of one kind of pod: podTemplate, overridden by `own`. Lists and maps are joined, other values are replaced. Arguments: root, own. */}}
{{- define "smcserve.podTemplate" -}}
{{- $all := deepCopy .root.Values.podTemplate -}}
{{- range $key, $value := .own -}}
{{- if kindIs "slice" $value -}}
{{- $_ := set $all $key (concat (index $all $key) $value) -}}
{{- else if kindIs "map" $value -}}
{{- $_ := set $all $key (mergeOverwrite (index $all $key) $value) -}}
{{- else -}}
{{- $_ := set $all $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* Metadata of a pod. Arguments: root, component, pod. */}}
{{- define "smcserve.podMetadata" -}}
labels:
  {{- include "smcserve.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .pod.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .pod.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Fields of every pod spec. Arguments: root, pod; optional: account, the service account of a pod that calls the Kubernetes API. */}}
{{- define "smcserve.podCommon" -}}
{{- $pod := .pod -}}
serviceAccountName: {{ default (include "smcserve.serviceAccount" .root) .account }}
automountServiceAccountToken: {{ not (empty .account) }}
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $name := list "priorityClassName" "runtimeClassName" "schedulerName" "securityContext" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "resourceClaims" }}
{{- with index $pod $name }}
{{ dict $name . | toYaml }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Fields of every container. Arguments: root, pod; optional: image, if it is not the service's. */}}
{{- define "smcserve.container" -}}
image: {{ default (include "smcserve.image" .root) .image }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- with .pod.containerSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Command with its script inline, so that an upgrade does not change the script of a running pod. Arguments: root, name. */}}
{{- define "smcserve.script" -}}
- bash
- -c
- {{ .root.Files.Get (printf "files/scripts/%s" .name) | toJson }}
- {{ .name }}
{{- end -}}

{{/* Environment of every container: files are written to /tmp, and no model hub is contacted. Arguments: root, pod. */}}
{{- define "smcserve.env" -}}
- {name: HOME, value: /tmp}
- {name: PYTHONDONTWRITEBYTECODE, value: "1"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- with .pod.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Environment of containers in the RayCluster of a job; KubeRay adds the token to all of them. Arguments: root, pod. */}}
{{- define "smcserve.jobEnv" -}}
- {name: RAY_AUTH_MODE, value: {{ .root.Values.ray.auth.mode }}}
{{ include "smcserve.env" . }}
{{- end -}}

{{/* Environment of containers in the RayCluster of a service, with the token, which KubeRay does not add to the gateway. Arguments: root, pod. */}}
{{- define "smcserve.rayEnv" -}}
{{- with .root.Values.ray.auth -}}
{{- if eq .mode "token" -}}
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ default (include "smcserve.name" $.root) .secret }}, key: auth_token}
{{ end -}}
{{- end -}}
{{- include "smcserve.jobEnv" . }}
{{- end -}}

{{/* Volume mounts of every container. Arguments: root, pod. */}}
{{- define "smcserve.baseMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- with .pod.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Volumes of every pod. Arguments: root, pod, shm. */}}
{{- define "smcserve.baseVolumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .root.Values.tmp.size }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .shm }}}
{{- with .pod.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Resources of a pod's first container, which requests the space that the pod's /tmp takes on its node. Arguments: root, resources. */}}
{{- define "smcserve.withStorage" -}}
{{- $request := dict "ephemeral-storage" .root.Values.tmp.request -}}
{{- toYaml (merge (deepCopy .resources) (dict "requests" $request)) -}}
{{- end -}}

{{/* Init containers of the chart, then the user's. Arguments: root, pod. */}}
{{- define "smcserve.initContainers" -}}
{{- $own := concat (include "smcserve.modelsInit" . | fromYamlArray) (include "smcserve.tritonInit" . | fromYamlArray) .pod.initContainers -}}
{{- with $own }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "smcserve.sidecars" -}}
{{- with .pod.sidecars }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Init container of rank pods: checks the driver version and copies Triton's prebuilt cache to a writable volume, because the image has no C compiler. Arguments: root, pod, ranks. */}}
{{- define "smcserve.tritonInit" -}}
{{- if and .ranks (eq .root.Values.device "cuda") }}
- name: triton
  {{- include "smcserve.container" . | nindent 2 }}
  command: [check-driver, cp, -R, /opt/smcserve/triton/., /triton/]
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {cpu: "1", memory: 64Mi}
  volumeMounts:
    - {name: triton, mountPath: /triton}
{{- end }}
{{- end -}}

{{- define "smcserve.tritonMounts" -}}
{{- if eq .root.Values.device "cuda" }}
- {name: triton, mountPath: /opt/smcserve/triton}
{{- end }}
{{- end -}}

{{- define "smcserve.tritonVolumes" -}}
{{- if eq .root.Values.device "cuda" }}
- name: triton
  emptyDir: {sizeLimit: 2Gi}
{{- end }}
{{- end -}}
