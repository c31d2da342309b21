{{- define "fared.name" -}}
{{- if contains "fared" .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-fared" .Release.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "fared.selector" -}}
app.kubernetes.io/name: fared
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "fared.labels" -}}
{{ include "fared.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* The workers of a fleet are other pods than those of the nodes. */ -}}
{{- define "fared.fleetSelector" -}}
app.kubernetes.io/name: fared-fleet
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "fared.fleetLabels" -}}
{{ include "fared.fleetSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "fared.fleetTLS" -}}
- {name: FARED_TLS_CERT, value: /etc/fared-tls/tls.crt}
- {name: FARED_TLS_KEY, value: /etc/fared-tls/tls.key}
- {name: FARED_TLS_CA, value: /etc/fared-tls/ca.crt}
{{- end }}

{{- define "fared.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* A mapping or a text, as a text. */ -}}
{{- define "fared.text" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toYaml . }}{{ end }}
{{- end }}

{{- /* The user and group of the control plane. */ -}}
{{- define "fared.user" -}}
{{- if .Values.controlPlane.netRaw }}0{{ else }}{{ .Values.controlPlane.user | int64 }}{{ end }}
{{- end }}

{{- define "fared.pods" -}}
{{- if or .Values.cni.enabled .Values.nri.enabled }}true{{ end }}
{{- end }}

{{- /* The mounts of network namespaces; they appear in the container when the runtime makes them. */ -}}
{{- define "fared.namespaces" -}}
- {name: netns, mountPath: /run/netns, mountPropagation: HostToContainer}
- {name: netns, mountPath: /var/run/netns, mountPropagation: HostToContainer}
{{- end }}

{{- /* The files of the ConfigMap. */ -}}
{{- define "fared.data" -}}
{{- with .Values.fabric.description }}
fabric.yaml: {{ include "fared.text" . | quote }}
{{- end }}
{{- with .Values.fabric.nodes }}
servers.yaml: {{ toYaml . | quote }}
{{- end }}
{{- with .Values.common }}
common.yaml: {{ include "fared.text" . | quote }}
{{- end }}
{{- range $node, $own := .Values.nodes }}
{{- if has $node (list "fabric" "servers" "common") }}
{{- fail (printf "nodes: a node cannot be named %s" $node) }}
{{- end }}
{{ $node }}.yaml: {{ include "fared.text" $own | quote }}
{{- end }}
{{- end }}

{{- /* The hook of a daemon's container: it outlives the drains of a node that shuts down. */ -}}
{{- define "fared.hold" -}}
lifecycle:
  preStop:
    exec: {command: [/usr/bin/fared-kube, hold, --file=/run/fared-kube/leaving, --limit={{ sub (.Values.terminationGracePeriodSeconds | int64) 5 }}s]}
{{- end }}
