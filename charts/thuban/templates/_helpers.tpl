{{/* The image of a workload: (list . .Values.images.NAME) */}}
{{- define "thuban.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- printf "%s/%s" $root.Values.images.registry $image.repository -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ end -}}
{{- end }}

{{/* Pods start anew when the values of `config` change: (list . .Values.WORKLOAD) */}}
{{- define "thuban.podAnnotations" -}}
{{- $root := index . 0 -}}
{{- $annotations := deepCopy (index . 1).podAnnotations -}}
{{- if not $root.Values.kustomize -}}
{{- $_ := set $annotations "checksum/config" (toYaml $root.Values.config | sha256sum) -}}
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

{{/* Whether the CRD of ClusterNetworkPolicy is made here: a CRD of somebody else stays as it is. */}}
{{- define "thuban.makesClusterNetworkPolicies" -}}
{{- $name := "clusternetworkpolicies.policy.networking.k8s.io" -}}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $name -}}
{{- $owner := dig "metadata" "annotations" "meta.helm.sh/release-name" "" ($found | default dict) -}}
{{- if and .Values.crds.clusterNetworkPolicies (or (not $found) (eq $owner .Release.Name)) -}}true{{- end -}}
{{- end }}

{{/* A value of `config` that has no default. */}}
{{- define "thuban.required" -}}
{{- $root := index . 0 -}}
{{- $key := index . 1 -}}
{{- required (printf "config.%s must be set: %s" $key (index . 2)) (index $root.Values.config $key) -}}
{{- end }}
