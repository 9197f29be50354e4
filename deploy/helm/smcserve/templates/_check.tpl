{{/* Checks of the values, before any object is created. */}}

{{/* Fails for invalid values, with the value given and the values allowed. */}}
{{- define "smcserve.check" -}}
{{- $v := .Values -}}
{{- include "smcserve.checkFiles" . -}}
{{- include "smcserve.checkNames" . -}}
{{- if not $v.image.repository -}}
{{- fail "image.repository is empty; give the repository to which you pushed the image, such as --set image.repository=registry.example/smcserve: docs/kubernetes.md says how to build it" -}}
{{- end -}}
{{- if not (or $v.serve.enabled $v.batch.enabled) -}}
{{- fail "serve.enabled and batch.enabled are both false; enable one, or nothing is installed" -}}
{{- end -}}
{{- if and (eq $v.topology "pod") $v.batch.enabled -}}
{{- fail "batch.enabled=true with topology=pod; a batch runs on a RayCluster: use topology=cluster" -}}
{{- end -}}
{{- if $v.batch.enabled -}}
{{- include "smcserve.checkBatch" . -}}
{{- end -}}
{{- if and $v.keda.enabled (ne $v.topology "pod") -}}
{{- fail "keda.enabled=true with topology=cluster; a RayCluster cannot be scaled from outside: use topology=pod, or install more releases" -}}
{{- end -}}
{{- if and $v.keda.enabled (lt (int $v.keda.maxReplicas) (int $v.keda.minReplicas)) -}}
{{- fail (printf "keda.maxReplicas=%v; allowed: at least keda.minReplicas=%v" $v.keda.maxReplicas $v.keda.minReplicas) -}}
{{- end -}}
{{- if and $v.keda.enabled (gt (int $v.keda.fallbackReplicas) (int $v.keda.maxReplicas)) -}}
{{- fail (printf "keda.fallbackReplicas=%v; allowed: at most keda.maxReplicas=%v" $v.keda.fallbackReplicas $v.keda.maxReplicas) -}}
{{- end -}}
{{- include "smcserve.checkHpa" . -}}
{{- include "smcserve.checkEgress" . -}}
{{- if and $v.monitoring.serviceMonitor $v.monitoring.podMonitor -}}
{{- fail "monitoring.serviceMonitor and monitoring.podMonitor are both true; choose one, or everything is measured twice" -}}
{{- end -}}
{{- if and $v.engine.branches (eq $v.engine.form "lockstep") -}}
{{- fail (printf "engine.branches=%v has no effect with engine.form=lockstep; leave it out" $v.engine.branches) -}}
{{- end -}}
{{- if and $v.service.headless (ne $v.service.type "ClusterIP") -}}
{{- fail (printf "service.headless=true with service.type=%s; only a Service of type ClusterIP can be headless" $v.service.type) -}}
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
{{- if eq $v.placement "shared" -}}
{{- include "smcserve.checkShared" . -}}
{{- end -}}
{{- range $side := list "draft" "target" -}}
{{- $group := index $v $side -}}
{{- if $group.gpus -}}
{{- if ne $v.device "cuda" -}}
{{- fail (printf "%s.gpus=%v has no effect with device=%s; use device=cuda, or leave it out" $side $group.gpus $v.device) -}}
{{- else if lt (int $group.gpus) (default 1 $group.tp | int) -}}
{{- fail (printf "%s.gpus=%v; allowed: at least %s.tp=%v, because the ranks of a model share a pod" $side $group.gpus $side (default 1 $group.tp)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.serve.enabled (eq $v.topology "cluster") -}}
{{- range $side := list "draft" "target" -}}
{{- if lt (int (index $v $side "replicas")) (int $v.workerGroups) -}}
{{- fail (printf "%s.replicas=%v with workerGroups=%v; allowed: at least %v, a pod for each worker group" $side (index $v $side "replicas") $v.workerGroups $v.workerGroups) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "smcserve.checkModels" . -}}
{{- include "smcserve.checkPods" . -}}
{{- include "smcserve.checkPorts" . -}}
{{- include "smcserve.checkRoutes" . -}}
{{- include "smcserve.checkRouter" . -}}
{{- include "smcserve.checkSecurity" . -}}
{{- include "smcserve.checkUnused" . -}}
{{- end -}}

{{- define "smcserve.checkShared" -}}
{{- $v := .Values -}}
{{- if ne $v.topology "pod" -}}
{{- fail (printf "placement=shared with topology=%s, which gives each model a pod of its own; use topology=pod" $v.topology) -}}
{{- end -}}
{{- if ne $v.engine.form "lockstep" -}}
{{- fail (printf "engine.form=%s with placement=shared, where the models work in turn; use engine.form=lockstep" $v.engine.form) -}}
{{- end -}}
{{- if not (has (default 1 $v.draft.tp | int) (list 1 (default 1 $v.target.tp | int))) -}}
{{- fail (printf "draft.tp=%v with placement=shared; allowed: target.tp=%v, or 1" $v.draft.tp $v.target.tp) -}}
{{- end -}}
{{- if $v.draft.gpus -}}
{{- fail (printf "draft.gpus=%v has no effect with placement=shared; the draft is on the target's GPUs" $v.draft.gpus) -}}
{{- end -}}
{{- end -}}

{{- define "smcserve.checkBatch" -}}
{{- $v := .Values -}}
{{- $batch := $v.batch -}}
{{- $egress := $v.networkPolicy.egress -}}
{{- if not (include "smcserve.batchFiles" .) -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "batch.volume" "batch.mountPath") "where" "addresses as batch.input and batch.output") -}}
{{- else if empty $batch.volume -}}
{{- fail "batch.volume is empty; give a volume that outlives the job, such as {persistentVolumeClaim: {claimName: ..}}, or its answers are lost; or s3:// or gs:// addresses as batch.input and batch.output" -}}
{{- end -}}
{{- if not (include "smcserve.batchStored" .) -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "batch.credentialsSecret") "where" "files as batch.input and batch.output") -}}
{{- else if and $v.networkPolicy.enabled $egress.enabled (empty $egress.rules) -}}
{{- fail (printf "networkPolicy.egress.rules is empty; batch reads or writes %s: name the addresses of the object store: [{to: [{ipBlock: {cidr: 203.0.113.0/24}}], ports: [{port: 443}]}]" (ternary $batch.output $batch.input (hasPrefix "/" $batch.input))) -}}
{{- end -}}
{{- end -}}

{{- define "smcserve.checkHpa" -}}
{{- $v := .Values -}}
{{- with $v.hpa -}}
{{- if .enabled -}}
{{- if $v.keda.enabled -}}
{{- fail "hpa.enabled and keda.enabled are both true; choose one: KEDA makes a HorizontalPodAutoscaler of its own, and two would set the same replicas" -}}
{{- end -}}
{{- if ne $v.topology "pod" -}}
{{- fail "hpa.enabled=true with topology=cluster; a RayCluster cannot be scaled from outside: use topology=pod, or install more releases" -}}
{{- end -}}
{{- if lt (int .maxReplicas) (int .minReplicas) -}}
{{- fail (printf "hpa.maxReplicas=%v; allowed: at least hpa.minReplicas=%v" .maxReplicas .minReplicas) -}}
{{- end -}}
{{- if .metrics -}}
{{- include "smcserve.unused" (dict "root" $ "paths" (list "hpa.queueTime" "hpa.slotShare") "where" "hpa.metrics, which replaces both metrics") -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails if pods could not reach what they need, which would show only as timeouts. */}}
{{- define "smcserve.checkEgress" -}}
{{- $egress := .Values.networkPolicy.egress -}}
{{- $downloads := include "smcserve.downloads" (dict "root" .) -}}
{{- if not .Values.networkPolicy.enabled -}}
{{- else if $egress.enabled -}}
{{- if and $downloads (not $egress.models) -}}
{{- fail "networkPolicy.egress.models is empty; models are downloaded: name the addresses of their hub, server or object store, or of a proxy: [{cidr: 203.0.113.0/24, ports: [443]}]" -}}
{{- end -}}
{{- if and .Values.router.enabled (not $egress.api) -}}
{{- fail "networkPolicy.egress.api is empty; the router finds replicas through Kubernetes' API: name its addresses, as `kubectl get endpoints kubernetes` has them: [{cidr: 10.0.0.1/32, ports: [6443]}]" -}}
{{- end -}}
{{- if not $downloads -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "networkPolicy.egress.models") "where" "models that are not downloaded") -}}
{{- end -}}
{{- if not .Values.router.enabled -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "networkPolicy.egress.api") "where" "router.enabled=false") -}}
{{- end -}}
{{- else -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "networkPolicy.egress") "where" "networkPolicy.egress.enabled=false") -}}
{{- end -}}
{{- end -}}

{{/* Fails if files of the chart are missing: some tools drop links and files. */}}
{{- define "smcserve.checkFiles" -}}
{{- range $name := prepend (.Files.Lines "files/index.txt") "index.txt" -}}
{{- if and $name (not ($.Files.Get (printf "files/%s" $name))) -}}
{{- fail (printf "the chart is not whole: files/%s is missing or empty; get it again, as deploy/helm/smcserve of the repository or as a package" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails for names that Kubernetes would refuse, some of them only long after the installation. */}}
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

{{- define "smcserve.checkModels" -}}
{{- $models := .Values.models -}}
{{- $given := dict -}}
{{- range $side := list "target" "draft" -}}
{{- $model := index $models $side -}}
{{- if and $model.path $model.source -}}
{{- fail (printf "models.%s.path=%q has no effect with models.%s.source; leave one out" $side $model.path $side) -}}
{{- end -}}
{{- $_ := set $given $side (or (not (empty $model.path)) (not (empty $model.source))) -}}
{{- end -}}
{{- if ne $given.target $given.draft -}}
{{- fail (printf "models.target and models.draft go together, and one of them has neither path nor source: target %v, draft %v; give both, or neither for the pair of the image" $given.target $given.draft) -}}
{{- end -}}
{{- if include "smcserve.downloads" (dict "root" .) -}}
{{- if not $models.volume -}}
{{- fail "models.volume is empty; a model that is downloaded needs a volume that all pods share, such as {persistentVolumeClaim: {claimName: ..}}" -}}
{{- end -}}
{{- else -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "models.download") "where" "models that are not downloaded") -}}
{{- end -}}
{{- end -}}

{{- define "smcserve.checkRoutes" -}}
{{- $v := .Values -}}
{{- if and $v.ingress.enabled (not $v.ingress.hosts) -}}
{{- fail "ingress.hosts is empty; name at least one host, or every call to the controller would come here" -}}
{{- end -}}
{{- if and $v.route.enabled (not $v.route.parentRefs) -}}
{{- fail "route.parentRefs is empty; name the Gateway that takes the calls: [{name: .., namespace: ..}]" -}}
{{- end -}}
{{- end -}}

{{/* Fails for labels and volume names that the chart sets itself. */}}
{{- define "smcserve.checkPods" -}}
{{- $v := .Values -}}
{{- $own := include "smcserve.labels" . | fromYaml -}}
{{- $volumes := list "tmp" "shm" "models" "model-target" "model-draft" "triton" "data" "config" "tls" "client-ca" "ca" "probe" "tokens" -}}
{{- $places := dict "podTemplate" $v.podTemplate "ray.head.podTemplate" $v.ray.head.podTemplate "pod.podTemplate" $v.pod.podTemplate "draft.podTemplate" $v.draft.podTemplate "target.podTemplate" $v.target.podTemplate "models.download.podTemplate" $v.models.download.podTemplate "router.podTemplate" $v.router.podTemplate -}}
{{- range $place, $pod := $places -}}
{{- range $label, $_ := $pod.labels -}}
{{- if or (hasKey $own $label) (eq $label "app.kubernetes.io/component") (hasPrefix "ray.io/" $label) -}}
{{- fail (printf "%s.labels: %s is set by the chart, and pods are found by it; use another label" $place $label) -}}
{{- end -}}
{{- end -}}
{{- range $pod.extraVolumes -}}
{{- if has .name $volumes -}}
{{- fail (printf "%s.extraVolumes: %s is a volume of the chart; use another name" $place .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $label, $_ := merge (dict) $v.commonLabels $v.service.labels -}}
{{- if or (hasKey $own $label) (eq $label "app.kubernetes.io/component") -}}
{{- fail (printf "commonLabels or service.labels: %s is set by the chart; use another label" $label) -}}
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
{{- fail "auth.tokensSecret without tls.secret: the tokens would be sent in plain text; give tls.secret too" -}}
{{- end -}}
{{- end -}}
{{- if ne (empty $v.tls.clientCaSecret) (empty $v.tls.probeSecret) -}}
{{- fail "tls.clientCaSecret and tls.probeSecret go together: the probes must show a certificate that the service accepts" -}}
{{- end -}}
{{- end -}}

{{/* Fails for values that have no effect in the chosen topology or with the parts installed. */}}
{{- define "smcserve.checkUnused" -}}
{{- $v := .Values -}}
{{- $unused := list -}}
{{- if eq $v.topology "pod" -}}
{{- $unused = list "ray" "gateway.resources" "draft.gpuResource" "monitoring.ray" -}}
{{- range $side := list "draft" "target" -}}
{{- range list "replicas" "resources" "shm" "podTemplate" -}}
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
{{- if $v.hpa.enabled -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "pod.replicas") "where" "hpa.enabled=true: use hpa.minReplicas") -}}
{{- end -}}
{{- range $part := list "batch" "keda" "hpa" "ingress" "route" "router" -}}
{{- if not (index $v $part "enabled") -}}
{{- include "smcserve.unused" (dict "root" $ "paths" (list $part) "where" (printf "%s.enabled=false" $part)) -}}
{{- end -}}
{{- end -}}
{{- if not $v.networkPolicy.enabled -}}
{{- range $key, $_ := omit $v.networkPolicy "enabled" -}}
{{- include "smcserve.unused" (dict "root" $ "paths" (list (printf "networkPolicy.%s" $key)) "where" "networkPolicy.enabled=false") -}}
{{- end -}}
{{- end -}}
{{- if not $v.monitoring.rules -}}
{{- include "smcserve.unused" (dict "root" . "paths" (list "monitoring.runbookUrl") "where" "monitoring.rules=false") -}}
{{- end -}}
{{- if not $v.serve.enabled -}}
{{- $unused = list "workerGroups" "tls" "auth" "service" "keda" "hpa" "podDisruptionBudget" "monitoring.serviceMonitor" "monitoring.podMonitor" -}}
{{- $unused = concat $unused (list "gateway.port" "gateway.httpPort" "gateway.metricsPort" "gateway.resources" "gateway.config" "test" "ingress" "route" "router") -}}
{{- $unused = concat $unused (list "engine.maxQueue" "engine.maxQueuePages") -}}
{{- include "smcserve.unused" (dict "root" . "paths" $unused "where" "serve.enabled=false") -}}
{{- end -}}
{{- end -}}

{{/* Fails if a value at or below one of the dotted paths differs from its default. Arguments: root, paths, where. */}}
{{- define "smcserve.unused" -}}
{{- if not (hasKey .root "defaults") -}}{{- $_ := set .root "defaults" (.root.Files.Get "files/values.yaml" | fromYaml) -}}{{- end -}}
{{- $defaults := .root.defaults -}}
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
