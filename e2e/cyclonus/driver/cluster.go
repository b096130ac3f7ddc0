package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/mattfenwick/cyclonus/pkg/kube"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const (
	hostname        = "kubernetes.io/hostname"
	deletionTimeout = 2 * time.Minute
)

// A cluster is the one of KUBECONFIG, with namespaces and pods in one network.
type cluster struct {
	*kube.Kubernetes
	// Empty: the network default.
	network string
	// The cluster whose pods have the addresses that the pods here ask for; may be nil. The namespaces here have its
	// namespaces' names behind twinPrefix, and their labels.
	original *cluster
}

func connect(network string, original *cluster) (*cluster, error) {
	connected, err := kube.NewKubernetesForContext("")
	if err != nil {
		return nil, err
	}
	// Five requests in a second are the default: a reset of the cluster between cases would take as long as the cases.
	connected.RestConfig.QPS, connected.RestConfig.Burst = 100, 200
	if connected.ClientSet, err = kubernetes.NewForConfig(connected.RestConfig); err != nil {
		return nil, err
	}
	return &cluster{connected, network, original}, nil
}

// CreateNamespace makes the namespace in the cluster's network.
func (c *cluster) CreateNamespace(namespace *v1.Namespace) (*v1.Namespace, error) {
	if c.network != "" {
		namespace.Annotations = map[string]string{"thuban.dev/network": c.network}
	}
	if c.original != nil {
		namespace.Labels["ns"] = strings.TrimPrefix(namespace.Name, twinPrefix)
	}
	return c.Kubernetes.CreateNamespace(namespace)
}

// CreatePod makes the pod. One with an original gets its address, and runs on another node: an address is in use once
// on a node.
func (c *cluster) CreatePod(pod *v1.Pod) (*v1.Pod, error) {
	if c.original != nil {
		original, err := c.original.GetPod(strings.TrimPrefix(pod.Namespace, twinPrefix), pod.Name)
		if err != nil {
			return nil, err
		}
		pod.Annotations = map[string]string{"thuban.dev/ip": original.Status.PodIP}
		elsewhere := v1.NodeSelectorRequirement{
			Key: hostname, Operator: v1.NodeSelectorOpNotIn, Values: []string{original.Spec.NodeName}}
		terms := []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{elsewhere}}}
		pod.Spec.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{NodeSelectorTerms: terms}}}
	}
	return c.Kubernetes.CreatePod(pod)
}

// deleteNamespaces deletes those that exist, and waits until they are gone.
func (c *cluster) deleteNamespaces(names []string) error {
	end := time.Now().Add(deletionTimeout)
	client := c.ClientSet.CoreV1().Namespaces()
	for {
		remaining := ""
		for _, name := range names {
			err := client.Delete(context.TODO(), name, metav1.DeleteOptions{})
			if err != nil && !errors.IsNotFound(err) && !errors.IsConflict(err) {
				return err
			}
			if !errors.IsNotFound(err) {
				remaining = name
			}
		}
		if remaining == "" {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("namespace %s is not gone after %s", remaining, deletionTimeout)
		}
		time.Sleep(time.Second)
	}
}
