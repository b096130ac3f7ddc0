package main

import (
	"strings"

	"github.com/mattfenwick/cyclonus/pkg/connectivity"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const twinPrefix = "twin-"

// A neighbour is a VPC with the cases' addresses, pods and labels, and with policies of its own: nobody reaches the
// pods of its first namespace, and they reach nobody. If a policy counted in both VPCs, cases would fail in one of
// them.
type neighbour struct {
	cluster     *cluster
	namespaces  []string
	interpreter *connectivity.Interpreter
}

// newNeighbour makes the neighbour of the cases' pods.
func newNeighbour(network string, original *cluster) (*neighbour, error) {
	beside := &neighbour{}
	for _, name := range strings.Fields(names) {
		beside.namespaces = append(beside.namespaces, twinPrefix+name)
	}
	var err error
	if beside.cluster, err = connect(network, original); err != nil {
		return nil, err
	}
	if err := beside.cluster.deleteNamespaces(beside.namespaces); err != nil {
		return nil, err
	}
	if beside.interpreter, _, err = prepare(beside.cluster, beside.namespaces, false); err != nil {
		return nil, err
	}
	_, err = beside.cluster.CreateNetworkPolicy(&networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "closed", Namespace: beside.namespaces[0]},
		Spec: networkingv1.NetworkPolicySpec{
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}},
	})
	return beside, err
}

// check compares who reaches whom in the neighbour with its own policies.
func (n *neighbour) check() *connectivity.Result {
	read := &generator.Action{ReadNetworkPolicies: &generator.ReadNetworkPoliciesAction{Namespaces: n.namespaces}}
	return n.interpreter.ExecuteTestCase(&generator.TestCase{
		Steps: []*generator.TestStep{{
			Actions: []*generator.Action{read},
			Probe:   generator.NewAllAvailable(generator.ProbeModePodIP)}}})
}
