{{/* Pod of a worker group. Arguments: root, pod, side, group, gpus, gateway. */}}

{{- define "smcserve.workerPod" -}}
metadata:
  {{- include "smcserve.podMetadata" (merge (dict "component" .side) .) | nindent 2 }}
spec:
  {{- include "smcserve.podCommon" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "smcserve.gracePeriod" .root }}
  {{- include "smcserve.initContainers" (merge (dict "ranks" true) .) | nindent 2 }}
  containers:
    - name: ray-worker
      {{- include "smcserve.container" . | nindent 6 }}
      ports:
        - {name: metrics, containerPort: 8080}
      env:
        {{- include (ternary "smcserve.rayEnv" "smcserve.jobEnv" .gateway) . | nindent 8 }}
      lifecycle:
        preStop:
          exec:
            command:
              {{- include "smcserve.script" (dict "root" .root "name" "drain-worker.sh") | nindent 14 }}
              - {{ include "smcserve.drain" .root | quote }}
      resources:
        {{- include "smcserve.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "smcserve.baseMounts" . | nindent 8 }}
        {{- include "smcserve.modelMounts" . | nindent 8 }}
        {{- include "smcserve.tritonMounts" . | nindent 8 }}
    {{- include "smcserve.sidecars" . | nindent 4 }}
  volumes:
    {{- include "smcserve.baseVolumes" (merge (dict "shm" .group.shm) .) | nindent 4 }}
    {{- include "smcserve.modelVolumes" . | nindent 4 }}
    {{- include "smcserve.tritonVolumes" . | nindent 4 }}
{{- end -}}

{{/* Resources including GPUs, whose request equals their limit. No GPUs if a resource claim provides them. Arguments: root, group (with resources, gpuResource), gpus. */}}
{{- define "smcserve.resources" -}}
{{- $resources := include "smcserve.withStorage" (dict "root" .root "resources" .group.resources) | fromYaml -}}
{{- if and .gpus .group.gpuResource -}}
{{- $gpus := dict .group.gpuResource .gpus -}}
{{- $resources = mergeOverwrite $resources (dict "requests" $gpus "limits" $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
