{{- define "gateway.labels" -}}
{app.kubernetes.io/name: llm-session-gateway, app.kubernetes.io/instance: {{ .Release.Name }}, app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}, app.kubernetes.io/managed-by: {{ .Release.Service }}}
{{- end }}
{{- define "gateway.selector" -}}
{app.kubernetes.io/name: llm-session-gateway, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end }}
{{- define "gateway.graceSeconds" -}}
{{ dig "server" "shutdown_grace_s" 30 .Values.config }}
{{- end }}
