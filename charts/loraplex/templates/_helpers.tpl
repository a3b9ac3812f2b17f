{{- define "loraplex.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* At most 50 characters, so that -artifacts, -headless and the number of a pod fit into 63. */}}
{{- define "loraplex.fullname" -}}
{{- $name := include "loraplex.name" . }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- default $full .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "loraplex.selectorLabels" -}}
app.kubernetes.io/name: {{ include "loraplex.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "loraplex.labels" -}}
{{ include "loraplex.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{- end }}

{{/* The pods that serve; a migration's pod has another component. */}}
{{- define "loraplex.serverLabels" -}}
{{ include "loraplex.selectorLabels" . }}
app.kubernetes.io/component: server
{{- end }}

{{- define "loraplex.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}
{{- end }}

{{- define "loraplex.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "loraplex.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* "yes" where more than one replica may run. */}}
{{- define "loraplex.several" -}}
{{- $autoscaled := and (ne .Values.autoscaling.provider "none") (gt (int .Values.autoscaling.maxReplicas) 1) }}
{{- if or $autoscaled (gt (int .Values.replicas) 1) }}yes{{ end }}
{{- end }}

{{- define "loraplex.artifactsDir" -}}/var/lib/loraplex-artifacts{{- end }}

{{- define "loraplex.artifactsClaim" -}}
{{- default (printf "%s-artifacts" (include "loraplex.fullname" .)) .Values.artifacts.existingClaim }}
{{- end }}

{{/* The pods' security, that of "restricted" in the Pod Security Standards. OnRootMismatch: with Always the kubelet
     would make every file writable for the group at each start, and the server takes no compiled kernels that others
     may write to. */}}
{{- define "loraplex.podSecurity" -}}
automountServiceAccountToken: false
{{- /* Else Services of this namespace would bring variables such as LORAPLEX_PORT=tcp://… and stop the start. */}}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- with .Values.runAs.user }}
  runAsUser: {{ int . }}
  {{- end }}
  {{- with .Values.runAs.group }}
  runAsGroup: {{ int . }}
  fsGroup: {{ int . }}
  {{- end }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "loraplex.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* Variables from Secrets: a dict of their names and what each is (existingSecret, key). */}}
{{- define "loraplex.secretVariables" -}}
{{- range $name, $of := . }}
{{- if $of.existingSecret }}
- name: {{ $name }}
  valueFrom:
    secretKeyRef:
      name: {{ $of.existingSecret }}
      key: {{ $of.key }}
{{- end }}
{{- end }}
{{- end }}

{{/* A setting as text. Numbers by toJson: large ones would else become 2.68435456e+08. "$(" would name a variable. */}}
{{- define "loraplex.settingText" -}}
{{- if kindIs "string" . }}{{ . | replace "$(" "$$(" }}
{{- else if kindIs "slice" . }}{{ join "," . | replace "$(" "$$(" }}
{{- else }}{{ toJson . }}
{{- end }}
{{- end }}

{{/* Those that an engine has: a change of others leaves engines alone. */}}
{{- define "loraplex.engineSettings" -}}
["model", "served_model_name", "device", "dtype", "quantise", "max_model_len", "kernels", "attention",
"batch_invariant", "speculation", "threads", "engine_spare", "kv_cache_memory", "kv_cache_dtype",
"kv_host_memory", "kv_disk", "state_cache",
"adapter_memory", "adapter_cpu_memory", "max_num_seqs", "max_num_batched_tokens", "max_step_ms", "max_waiting",
"max_adapter_rank", "data_dir", "artifact_url", "artifact_cache_size", "engine_token_file", "engine_tls", "drain_timeout", "log_level"]
{{- end }}

{{/* The settings as the pod has them, as YAML: those of the values, and what other values decide. With isEngine those of
     an engine. */}}
{{- define "loraplex.settings" -}}
{{- $settings := deepCopy .Values.settings }}
{{- if and .Values.artifacts.shared (not $settings.artifact_url) }}
{{- $_ := set $settings "artifact_url" (printf "file://%s" (include "loraplex.artifactsDir" .)) }}
{{- end }}
{{- if and .Values.gpu.enabled (not $settings.device) }}
{{- $_ := set $settings "device" "cuda" }}
{{- end }}
{{- if .Values.cluster.enabled }}
{{- $_ := set $settings "engine_token_file" (printf "%s/token" (include "loraplex.engineTokenDir" .)) }}
{{- if .Values.cluster.tls.existingSecret }}
{{- $_ := set $settings "engine_tls" (include "loraplex.engineTlsDir" .) }}
{{- end }}
{{- if .isEngine }}
{{- range $name := keys $settings }}
{{- if not (has $name (include "loraplex.engineSettings" $ | fromJsonArray)) }}
{{- $_ := unset $settings $name }}
{{- end }}
{{- end }}
{{- else }}
{{- $_ := set $settings "replicas" 0 }}
{{- $_ := set $settings "engine_port" (printf "0.0.0.0:%d" (int .Values.cluster.enginePort)) }}
{{- end }}
{{- end }}
{{- range $name, $value := $settings }}
{{- if not (kindIs "invalid" $value) }}
- name: LORAPLEX_{{ upper $name }}
  value: {{ include "loraplex.settingText" $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "loraplex.engineTokenDir" -}}/run/secrets/loraplex-engine{{- end }}

{{/* The volume of the token that server and engines share. */}}
{{- define "loraplex.engineTokenVolume" -}}
- name: engine-token
  secret:
    secretName: {{ .Values.secrets.engineToken.existingSecret }}
    defaultMode: 0400
    items:
      - {key: {{ .Values.secrets.engineToken.key }}, path: token}
{{- end }}

{{- define "loraplex.engineTlsDir" -}}/run/secrets/loraplex-engine-tls{{- end }}

{{/* The volume of the engine port's TLS: the server's certificate and its private key, or what engines trust, which get no
     private key. */}}
{{- define "loraplex.engineTlsVolume" -}}
{{- with .Values.cluster.tls }}
{{- if .existingSecret }}
- name: engine-tls
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0400
    items:
      {{- if $.isEngine }}
      - {key: {{ .ca }}, path: ca.crt}
      {{- else }}
      - {key: {{ .cert }}, path: tls.crt}
      - {key: {{ .key }}, path: tls.key}
      {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "loraplex.engineTlsMount" -}}
{{- if .Values.cluster.tls.existingSecret }}
- {name: engine-tls, mountPath: {{ include "loraplex.engineTlsDir" . }}, readOnly: true}
{{- end }}
{{- end }}

{{/* By which alerts and the autoscaler select this release's series: labels that the ServiceMonitor brings. */}}
{{- define "loraplex.series" -}}
namespace="{{ .Release.Namespace }}",job="{{ include "loraplex.fullname" . }}-admin"
{{- end }}

{{/* Requests and limits as YAML: those that are given, or what the device needs; and the devices. A dict of `given`, the
     number of `gpus`, and `gpu` of the values. */}}
{{- define "loraplex.resources" -}}
{{- $small := dict "cpu" "2" "memory" "4Gi" }}
{{- $large := dict "cpu" "4" "memory" "32Gi" }}
{{- $default := ternary $large $small (gt .gpus 0) }}
{{- $resources := deepCopy (default (dict "requests" $default "limits" $default) .given) }}
{{- $limits := default dict $resources.limits }}
{{- if gt .gpus 0 }}
{{- $limits = set $limits .gpu.resourceName .gpus }}
{{- end }}
{{- toYaml (set $resources "limits" $limits) }}
{{- end }}
