{{- define "openrl.name" -}}
{{- if contains "openrl" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-openrl" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "openrl.selector" -}}
app.kubernetes.io/name: openrl
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "openrl.labels" -}}
{{ include "openrl.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "openrl.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}{{ else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "openrl.secret" -}}
{{ .Values.auth.existingSecret | default (printf "%s-keys" (include "openrl.name" .)) }}
{{- end }}

{{/* A quantity in Mi or Gi as a number of Mi. */}}
{{- define "openrl.mebibytes" -}}
{{- if hasSuffix "Gi" . }}{{ mul (trimSuffix "Gi" . | int) 1024 }}{{ else }}{{ trimSuffix "Mi" . | int }}{{ end }}
{{- end }}

{{/* The memory of the pod: openrl/models/info.py's memory_needed for each model, the server, and what is asked for on top. */}}
{{- define "openrl.memory" -}}
{{- if .Values.resources.memory }}{{ .Values.resources.memory }}
{{- else }}
{{- $bytes := ternary 2 4 (eq .Values.dtype "bfloat16") }}
{{- $total := add 512 (include "openrl.mebibytes" .Values.resources.extraMemory | int) }}
{{- range .Values.models }}
{{- if not .parametersMillion }}{{ fail (printf "models: %s needs parametersMillion (its size), or set resources.memory" .source) }}{{ end }}
{{- /* 1,000,000 weights x bytes / 2^20, rounded up */}}
{{- $total = add $total 1024 (div (add (mul .parametersMillion 1000000 $bytes) 1048575) 1048576) }}
{{- end }}{{ $total }}Mi
{{- end }}
{{- end }}

{{/* Init containers and the server: same user, no rights, nothing to write to but volumes. */}}
{{- define "openrl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
capabilities:
  drop: [ALL]
{{- end }}

{{- define "openrl.resources" -}}
requests:
  cpu: {{ .Values.resources.cpu | quote }}
  memory: {{ include "openrl.memory" . }}
  ephemeral-storage: {{ .Values.resources.ephemeralStorage }}
limits:
  memory: {{ include "openrl.memory" . }}
  ephemeral-storage: {{ .Values.resources.ephemeralStorage }}
{{- end }}

{{- define "openrl.mounts" -}}
- name: data
  mountPath: /data
- name: tmp
  mountPath: /tmp
{{- end }}

{{- define "openrl.huggingFaceToken" -}}
{{- if .Values.huggingFace.existingSecret -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.huggingFace.existingSecret }}
      key: token
{{- end }}
{{- end }}
