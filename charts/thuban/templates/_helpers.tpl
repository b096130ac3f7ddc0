{{/* The image of a workload: (list . .Values.images.NAME) */}}
{{- define "thuban.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $name := printf "%s/%s" $root.Values.images.registry $image.repository -}}
{{- if $image.digest }}{{ printf "%s@%s" $name $image.digest }}{{ else }}{{ printf "%s:%s" $name ($image.tag | default $root.Chart.AppVersion) }}{{ end -}}
{{- end }}

{{/* Annotations of a workload's pods. With the last one pods start anew when a value of `config` changes, or the namespace
     of thuban-observe, which is a value there, too: (list . .Values.WORKLOAD READS_CONFIG) */}}
{{- define "thuban.podAnnotations" -}}
{{- $root := index . 0 -}}
{{- $annotations := deepCopy ((index . 1).podAnnotations | default dict) -}}
{{- if and (index . 2) (not $root.Values.kustomize) -}}
{{- $config := toYaml $root.Values.config -}}
{{- if $root.Values.observe.enabled -}}
{{- $config = printf "%s\nobserve: %s" $config $root.Values.observe.namespace -}}
{{- end -}}
{{- $_ := set $annotations "checksum/config" (sha256sum $config) -}}
{{- end -}}
{{- with $annotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end }}

{{- define "thuban.pullSecrets" -}}
{{- with .Values.images.pullSecrets -}}
imagePullSecrets:
{{ toYaml . }}
{{- end -}}
{{- end }}

{{- define "thuban.nodeSelector" -}}
{{- with .nodeSelector -}}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end }}

{{- define "thuban.tolerations" -}}
{{- with .tolerations -}}
{{ toYaml . }}
{{- end -}}
{{- end }}

{{/* transitd's port for metrics, if whoever reaches the node reads them there. */}}
{{- define "thuban.transitdMetricsPort" -}}
{{- $port := toString .Values.config.THUBAN_TRANSITD_METRICS_PORT -}}
{{- if and (eq .Values.config.THUBAN_TRANSITD_METRICS_ADDRESS "node") (ne $port "0") -}}{{ $port }}{{- end -}}
{{- end }}

{{/* Whether the CRD of ClusterNetworkPolicy is made here: a CRD of somebody else stays as it is. */}}
{{- define "thuban.makesClusterNetworkPolicies" -}}
{{- $name := "clusternetworkpolicies.policy.networking.k8s.io" -}}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $name -}}
{{- $annotations := dig "metadata" "annotations" dict ($found | default dict) -}}
{{- $owner := printf "%s/%s" (index $annotations "meta.helm.sh/release-namespace") (index $annotations "meta.helm.sh/release-name") -}}
{{- $own := printf "%s/%s" .Release.Namespace .Release.Name -}}
{{- if and .Values.crds.clusterNetworkPolicies (or (not $found) (eq $owner $own)) -}}true{{- end -}}
{{- end }}

{{/* A value of `config` that has no default. */}}
{{- define "thuban.required" -}}
{{- $root := index . 0 -}}
{{- $key := index . 1 -}}
{{- required (printf "config.%s must be set: %s" $key (index . 2)) (index $root.Values.config $key) -}}
{{- end }}
