{{/* Names, labels, the image, and what is refused. */}}

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

{{/* Labels of the pods that calls go to. */}}
{{- define "smcserve.gatewaySelector" -}}
{{- if eq .Values.topology "cluster" -}}
ray.io/cluster: {{ include "smcserve.name" . }}
ray.io/node-type: head
{{- else -}}
{{ include "smcserve.selector" . }}
app.kubernetes.io/component: gang
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

{{/* GPUs of a pod of one side; 0 on CPUs. Arguments: root, side. */}}
{{- define "smcserve.gpus" -}}
{{- $group := index .root.Values .side -}}
{{- if eq .root.Values.device "cuda" -}}{{ default $group.tp $group.gpus | int }}{{- else -}}0{{- end -}}
{{- end -}}

{{/* What a pod that is told to end takes: preStop, drain, last words, and the end of every process. */}}
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

{{/* A mistake ends here, with what was given and what is allowed. */}}
{{- define "smcserve.check" -}}
{{- $v := .Values -}}
{{- include "smcserve.checkFiles" . -}}
{{- include "smcserve.checkNames" . -}}
{{- if not (or $v.serve.enabled $v.batch.enabled) -}}
{{- fail "serve.enabled and batch.enabled are both false; enable one, or nothing is installed" -}}
{{- end -}}
{{- if ne (empty $v.models.target) (empty $v.models.draft) -}}
{{- fail (printf "models.target=%q with models.draft=%q; give both, or neither for the pair of the image" $v.models.target $v.models.draft) -}}
{{- end -}}
{{- if and (eq $v.topology "pod") $v.batch.enabled -}}
{{- fail "batch.enabled=true with topology=pod; a batch runs on a RayCluster: use topology=cluster" -}}
{{- end -}}
{{- if and $v.batch.enabled (empty $v.batch.volume) -}}
{{- fail "batch.volume is empty; give a volume that outlives the job, such as {persistentVolumeClaim: {claimName: ..}}, or its answers are lost" -}}
{{- end -}}
{{- if and $v.keda.enabled (ne $v.topology "pod") -}}
{{- fail "keda.enabled=true with topology=cluster; a RayCluster cannot be scaled from outside: use topology=pod, or install more releases" -}}
{{- end -}}
{{- if and $v.keda.enabled (lt (int $v.keda.maxReplicas) (int $v.keda.minReplicas)) -}}
{{- fail (printf "keda.maxReplicas=%v; allowed: at least keda.minReplicas=%v" $v.keda.maxReplicas $v.keda.minReplicas) -}}
{{- end -}}
{{- if and $v.monitoring.serviceMonitor $v.monitoring.podMonitor -}}
{{- fail "monitoring.serviceMonitor and monitoring.podMonitor are both true; choose one, or everything is measured twice" -}}
{{- end -}}
{{- if and $v.engine.branches (eq $v.engine.form "lockstep") -}}
{{- fail (printf "engine.branches=%v has no effect with engine.form=lockstep; leave it out" $v.engine.branches) -}}
{{- end -}}
{{- if and $v.service.headless (ne $v.service.type "ClusterIP") -}}
{{- fail (printf "service.headless=true with service.type=%s; only ClusterIP can be without an address" $v.service.type) -}}
{{- end -}}
{{- if ne $v.service.type "LoadBalancer" -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "service.loadBalancerClass" "service.loadBalancerSourceRanges") "where" (printf "service.type=%s" $v.service.type)) -}}
{{- end -}}
{{- with $v.pod.strategy -}}
{{- if eq .type "Recreate" -}}
{{- include "smcserve.unused" (dict "root" $ "paths" (list "pod.strategy.maxSurge" "pod.strategy.maxUnavailable") "where" "pod.strategy.type=Recreate") -}}
{{- else if and (has (toString .maxSurge) (list "0" "0%")) (has (toString .maxUnavailable) (list "0" "0%")) -}}
{{- fail "pod.strategy.maxSurge and pod.strategy.maxUnavailable are both 0; raise one, or no pod could ever be replaced" -}}
{{- end -}}
{{- end -}}
{{- if and $v.ray.auth.secret (eq $v.ray.auth.mode "disabled") -}}
{{- fail "ray.auth.secret has no effect with ray.auth.mode=disabled; use mode=token, or leave the secret out" -}}
{{- end -}}
{{- range $side := list "draft" "target" -}}
{{- $group := index $v $side -}}
{{- if $group.gpus -}}
{{- if ne $v.device "cuda" -}}
{{- fail (printf "%s.gpus=%v has no effect with device=%s; use device=cuda, or leave it out" $side $group.gpus $v.device) -}}
{{- else if lt (int $group.gpus) (int $group.tp) -}}
{{- fail (printf "%s.gpus=%v; allowed: at least %s.tp=%v, because the ranks of a model share a pod" $side $group.gpus $side $group.tp) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $own := include "smcserve.labels" . | fromYaml -}}
{{- range $label, $_ := $v.podLabels -}}
{{- if or (hasKey $own $label) (eq $label "app.kubernetes.io/component") (hasPrefix "ray.io/" $label) -}}
{{- fail (printf "podLabels: %s is set by the chart, and pods are found by it; use another label" $label) -}}
{{- end -}}
{{- end -}}
{{- include "smcserve.checkSecurity" . -}}
{{- include "smcserve.checkUnused" . -}}
{{- end -}}

{{/* Some tools drop links and files on the way: then the chart is not whole. */}}
{{- define "smcserve.checkFiles" -}}
{{- $needed := list "values.yaml" "rules.yml" "alerts.yml" "scripts/gateway.sh" "scripts/drain-head.sh" "scripts/drain-worker.sh" -}}
{{- range $name := concat $needed (list "dashboards/capacity.json" "dashboards/groups.json" "dashboards/particles.json" "dashboards/traffic.json") -}}
{{- if not ($.Files.Get (printf "files/%s" $name)) -}}
{{- fail (printf "the chart is not whole: files/%s is missing or empty; get it again, as deploy/helm/smcserve of the repository or as a package" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Names that Kubernetes would refuse, some of them long after the installation. */}}
{{- define "smcserve.checkNames" -}}
{{- $name := include "smcserve.name" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name %q, of release %q, is none for a Service or a RayCluster; allowed: a-z, 0-9 and '-', a letter first: give another release name, or fullnameOverride" $name .Release.Name) -}}
{{- end -}}
{{- with .Values.nameOverride -}}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$" .) -}}
{{- fail (printf "nameOverride=%q; allowed: a-z, 0-9 and '-', no '-' at either end" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "smcserve.checkSecurity" -}}
{{- $v := .Values -}}
{{- if not $v.tls.secret -}}
{{- range $name := list "clientCaSecret" "serverName" "caSecret" "probeSecret" -}}
{{- if index $v.tls $name -}}
{{- fail (printf "tls.%s has no effect without tls.secret; give it, or leave this out" $name) -}}
{{- end -}}
{{- end -}}
{{- if $v.auth.tokensSecret -}}
{{- fail "auth.tokensSecret without tls.secret: everybody on the way could read the tokens; give tls.secret too" -}}
{{- end -}}
{{- end -}}
{{- if ne (empty $v.tls.clientCaSecret) (empty $v.tls.probeSecret) -}}
{{- fail "tls.clientCaSecret and tls.probeSecret go together: the probes must show a certificate that the service accepts" -}}
{{- end -}}
{{- end -}}

{{/* What belongs to a topology, or to a part, that is not installed. */}}
{{- define "smcserve.checkUnused" -}}
{{- $v := .Values -}}
{{- $unused := list -}}
{{- if eq $v.topology "pod" -}}
{{- $unused = list "ray" "gateway.resources" "draft.gpuResource" -}}
{{- range $side := list "draft" "target" -}}
{{- range list "replicas" "resources" "shm" "nodeSelector" "tolerations" "affinity" -}}
{{- $unused = append $unused (printf "%s.%s" $side .) -}}
{{- end -}}
{{- end -}}
{{- include "smcserve.unused" (dict "root" . "paths" $unused "where" "topology=pod: use `pod.*`, and target.gpuResource") -}}
{{- else -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "pod") "where" "topology=cluster: use `draft.*` and `target.*`") -}}
{{- end -}}
{{- if $v.keda.enabled -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "pod.replicas") "where" "keda.enabled=true: use keda.minReplicas") -}}
{{- end -}}
{{- range $part := list "batch" "keda" "networkPolicy" -}}
{{- if not (index $v $part "enabled") -}}
{{- include "smcserve.unused" (dict "root" $ "paths" (list $part) "where" (printf "%s.enabled=false" $part)) -}}
{{- end -}}
{{- end -}}
{{- if not $v.monitoring.rules -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "monitoring.runbookUrl") "where" "monitoring.rules=false") -}}
{{- end -}}
{{- if not $v.serve.enabled -}}
{{- $unused = list "tls" "auth" "service" "keda" "podDisruptionBudget" "monitoring.serviceMonitor" "monitoring.podMonitor" -}}
{{- $unused = concat $unused (list "gateway.port" "gateway.metricsPort" "gateway.resources" "gateway.extraArgs") -}}
{{- $unused = concat $unused (list "engine.maxQueue" "engine.maxQueuePages") -}}
{{- include "smcserve.unused" (dict "root" . "paths" $unused "where" "serve.enabled=false") -}}
{{- end -}}
{{- end -}}

{{/* Refuses what differs from the default, at or below each of the dotted paths. Arguments: root, paths, where. */}}
{{- define "smcserve.unused" -}}
{{- $defaults := .root.Files.Get "files/values.yaml" | fromYaml -}}
{{- range $path := .paths -}}
{{- $default := $defaults -}}
{{- $given := $.root.Values -}}
{{- range splitList "." $path -}}
{{- $default = index $default . -}}
{{- $given = index $given . -}}
{{- end -}}
{{- if and (kindIs "map" $default) $default -}}
{{- range $key, $_ := $given -}}
{{- if hasKey $default $key -}}
{{- include "smcserve.unused" (dict "root" $.root "paths" (list (printf "%s.%s" $path $key)) "where" $.where) -}}
{{- else -}}
{{- fail (printf "%s.%s has no effect with %s" $path $key $.where) -}}
{{- end -}}
{{- end -}}
{{- else if ne (toJson $default) (toJson $given) -}}
{{- fail (printf "%s=%s has no effect with %s" $path (toJson $given) $.where) -}}
{{- end -}}
{{- end -}}
{{- end -}}
