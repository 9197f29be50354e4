{{/* A pod of a worker group. Arguments: root, side, group, gpus, gateway. */}}

{{- define "smcserve.workerPod" -}}
metadata:
  {{- include "smcserve.podMetadata" (dict "root" .root "component" .side) | nindent 2 }}
spec:
  {{- include "smcserve.podCommon" (dict "root" .root "place" .group) | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "smcserve.gracePeriod" .root }}
  {{- include "smcserve.tritonInit" .root | nindent 2 }}
  containers:
    - name: ray-worker
      {{- include "smcserve.container" .root | nindent 6 }}
      ports:
        - {name: metrics, containerPort: 8080}
      env:
        {{- include (ternary "smcserve.rayEnv" "smcserve.jobEnv" .gateway) .root | nindent 8 }}
      lifecycle:
        preStop:
          exec:
            command:
              {{- include "smcserve.script" (dict "root" .root "name" "drain-worker.sh") | nindent 14 }}
              - {{ include "smcserve.drain" .root | quote }}
      resources:
        {{- include "smcserve.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "smcserve.baseMounts" .root | nindent 8 }}
        {{- include "smcserve.modelMounts" .root | nindent 8 }}
  volumes:
    {{- include "smcserve.baseVolumes" (dict "root" .root "shm" .group.shm) | nindent 4 }}
    {{- include "smcserve.modelVolumes" .root | nindent 4 }}
{{- end -}}

{{/* Resources with the GPUs in them: a GPU's request is its limit. Arguments: group (with resources, gpuResource), gpus. */}}
{{- define "smcserve.resources" -}}
{{- $resources := deepCopy .group.resources -}}
{{- if .gpus -}}
{{- $gpus := dict .group.gpuResource .gpus -}}
{{- $resources = mergeOverwrite $resources (dict "requests" $gpus "limits" $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
