{{/* Spec of a RayCluster. Arguments: root, gateway (whether the head pod runs a gateway; the head of a batch job mounts its files instead). */}}

{{- define "smcserve.rayClusterSpec" -}}
{{- $v := .root.Values -}}
rayVersion: {{ $v.ray.version | quote }}
{{- if and .gateway $v.ray.upgradeStrategy }}
upgradeStrategy:
  type: {{ $v.ray.upgradeStrategy }}
{{- end }}
{{- if and (eq $v.ray.auth.mode "token") (or (not .gateway) (not $v.ray.auth.secret)) }}
authOptions:
  mode: token
  {{- with $v.ray.auth.secret }}
  secretName: {{ . }}
  {{- end }}
{{- end }}
headGroupSpec:
  # Workers use this Service to find the head before the gateway, and so the head pod, is ready; some operators would hide the pod until then.
  headService:
    spec:
      clusterIP: None
      publishNotReadyAddresses: true
  rayStartParams:
    dashboard-host: 0.0.0.0
    num-cpus: "0"
    num-gpus: "0"
    object-store-memory: {{ int64 $v.ray.objectStoreMemory | quote }}
  template:
    {{- $head := include "smcserve.podTemplate" (dict "root" .root "own" $v.ray.head.podTemplate) | fromYaml }}
    {{- $credentials := ternary (list) (include "smcserve.batchCredentials" .root | fromYamlArray) .gateway }}
    {{- $_ := set $head "envFrom" (concat $head.envFrom $credentials) }}
    {{- include (ternary "smcserve.headPod" "smcserve.batchHeadPod" .gateway) (dict "root" .root "pod" $head) | nindent 4 }}
workerGroupSpecs:
  {{- range $side := list "draft" "target" }}
  {{- $group := index $v $side }}
  {{- $gpus := include "smcserve.gpus" (dict "root" $.root "side" $side) }}
  {{- $pod := include "smcserve.podTemplate" (dict "root" $.root "own" $group.podTemplate) | fromYaml }}
  {{- $_ := set $pod "envFrom" (concat $pod.envFrom $credentials) }}
  - groupName: {{ $side }}
    replicas: {{ $group.replicas }}
    minReplicas: {{ $group.replicas }}
    maxReplicas: {{ $group.replicas }}
    rayStartParams:
      # CPUs for one worker group, and the custom resource that places its ranks in this group.
      num-cpus: {{ default 1 $group.tp | quote }}
      num-gpus: {{ $gpus | quote }}
      resources: {{ printf "'{\"smc_%s\": 1}'" $side | quote }}
      object-store-memory: {{ int64 $v.ray.objectStoreMemory | quote }}
    template:
      {{- include "smcserve.workerPod" (dict "root" $.root "pod" $pod "side" $side "group" $group "gpus" (int $gpus) "gateway" $.gateway) | nindent 6 }}
  {{- end }}
{{- end -}}

{{/* Environment of the pods of a batch job that reads or writes an object store: Ray gives parts of the input to any of them. */}}
{{- define "smcserve.batchCredentials" -}}
{{- with .Values.batch.credentialsSecret }}
- secretRef: {name: {{ . }}}
{{- end }}
{{- end -}}

{{/* Container of Ray's head. Arguments: root, pod. */}}
{{- define "smcserve.rayHeadContainer" -}}
name: ray-head
{{ include "smcserve.container" . }}
ports:
  - {name: gcs-server, containerPort: 6379}
  - {name: dashboard, containerPort: 8265}
  - {name: client, containerPort: 10001}
  - {name: metrics, containerPort: 8080}
resources:
  {{- include "smcserve.withStorage" (dict "root" .root "resources" .root.Values.ray.head.resources) | nindent 2 }}
{{- end -}}

{{/* Head pod of a service. The gateway is a Ray driver: it needs the sockets of its Ray node, so both share /tmp, /dev/shm and the PID namespace.
Arguments: root, pod. */}}
{{- define "smcserve.headPod" -}}
{{- $v := .root.Values -}}
metadata:
  {{- include "smcserve.podMetadata" (merge (dict "component" "head") .) | nindent 2 }}
spec:
  {{- include "smcserve.podCommon" . | nindent 2 }}
  {{- include "smcserve.hostAliases" .root | nindent 2 }}
  shareProcessNamespace: true
  terminationGracePeriodSeconds: {{ include "smcserve.gracePeriod" .root }}
  {{- include "smcserve.initContainers" . | nindent 2 }}
  containers:
    - {{- include "smcserve.rayHeadContainer" . | nindent 6 }}
      env:
        {{- include "smcserve.rayEnv" . | nindent 8 }}
      lifecycle:
        preStop:
          exec:
            command:
              {{- include "smcserve.script" (dict "root" .root "name" "drain-head.sh") | nindent 14 }}
              - {{ include "smcserve.drain" .root | quote }}
              - /tmp/gateway.lock
      volumeMounts:
        {{- include "smcserve.baseMounts" . | nindent 8 }}
    - name: gateway
      {{- include "smcserve.container" . | nindent 6 }}
      command:
        {{- include "smcserve.script" (dict "root" .root "name" "gateway.sh") | nindent 8 }}
        - 127.0.0.1:6379
        - /tmp/gateway.lock
      args:
        - {{ include "smcserve.configFlag" (dict "command" "serve") }}
      ports:
        {{- include "smcserve.gatewayPorts" .root | nindent 8 }}
      env:
        {{- include "smcserve.rayEnv" . | nindent 8 }}
      {{- include "smcserve.gatewayProbes" .root | nindent 6 }}
      {{- include "smcserve.gatewayLifecycle" .root | nindent 6 }}
      resources:
        {{- toYaml $v.gateway.resources | nindent 8 }}
      volumeMounts:
        {{- include "smcserve.baseMounts" . | nindent 8 }}
        {{- include "smcserve.configMount" . | nindent 8 }}
        {{- include "smcserve.modelMounts" . | nindent 8 }}
        {{- include "smcserve.secretMounts" .root | nindent 8 }}
    {{- include "smcserve.sidecars" . | nindent 4 }}
  volumes:
    {{- include "smcserve.baseVolumes" (merge (dict "shm" $v.ray.head.shm) .) | nindent 4 }}
    {{- include "smcserve.configVolume" (dict "root" .root "command" "serve") | nindent 4 }}
    {{- include "smcserve.modelVolumes" . | nindent 4 }}
    {{- include "smcserve.secretVolumes" .root | nindent 4 }}
{{- end -}}

{{/* Head pod of a batch job. The batch command runs there as a Ray job. Arguments: root, pod. */}}
{{- define "smcserve.batchHeadPod" -}}
{{- $v := .root.Values -}}
metadata:
  {{- include "smcserve.podMetadata" (merge (dict "component" "batch-head") .) | nindent 2 }}
spec:
  {{- include "smcserve.podCommon" . | nindent 2 }}
  {{- include "smcserve.initContainers" . | nindent 2 }}
  containers:
    - {{- include "smcserve.rayHeadContainer" . | nindent 6 }}
      env:
        {{- include "smcserve.jobEnv" . | nindent 8 }}
      volumeMounts:
        {{- include "smcserve.baseMounts" . | nindent 8 }}
        {{- if include "smcserve.batchFiles" .root }}
        - {name: data, mountPath: {{ $v.batch.mountPath }}}
        {{- end }}
        {{- include "smcserve.configMount" . | nindent 8 }}
        {{- include "smcserve.modelMounts" . | nindent 8 }}
    {{- include "smcserve.sidecars" . | nindent 4 }}
  volumes:
    {{- include "smcserve.baseVolumes" (merge (dict "shm" $v.ray.head.shm) .) | nindent 4 }}
    {{- if include "smcserve.batchFiles" .root }}
    - name: data
      {{- toYaml $v.batch.volume | nindent 6 }}
    {{- end }}
    {{- include "smcserve.configVolume" (dict "root" .root "command" "batch") | nindent 4 }}
    {{- include "smcserve.modelVolumes" . | nindent 4 }}
{{- end -}}
