{{- define "millstream.labels" -}}
app.kubernetes.io/name: millstream
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "millstream.image" -}}
{{ required "image.repository: the image of the app" .Values.image.repository }}:{{ required "image.tag: its tag" .Values.image.tag }}
{{- end }}
{{- define "millstream.pod" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65534
  runAsGroup: 65534
  seccompProfile:
    type: RuntimeDefault
{{- end }}
{{- define "millstream.container" -}}
image: {{ include "millstream.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop:
      - ALL
{{- end }}
{{- define "millstream.env" -}}
- name: MILLSTREAM_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.secret | quote }}
      key: {{ .Values.redis.key | quote }}
{{- with .Values.extraEnv }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}
{{- define "millstream.probes" -}}
readinessProbe:
  httpGet:
    path: /readyz
    port: metrics
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  httpGet:
    path: /healthz
    port: metrics
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 30
{{- end }}
{{- define "millstream.exporter" -}}
{{- if .Values.exporter.enabled }}
{{- .Release.Name }}-exporter
{{- else }}
{{- required "exporter.service: the service of the exporter of another release" .Values.exporter.service }}
{{- end }}
{{- end }}
{{- define "millstream.trigger" -}}
url: "http://{{ include "millstream.exporter" . }}:{{ .Values.exporter.port }}/scale?handler={{ required "autoscaling.handler: the handler to scale by, as APP.HANDLER" .Values.autoscaling.handler }}"
targetValue: {{ .Values.autoscaling.target | quote }}
{{- end }}
