// Runs cyclonus's generated cases against the cluster of KUBECONFIG.
//
// Cases, expected results and their comparison are cyclonus's own. `cyclonus generate` starts a program in a pod for
// each probe: hours for all cases. This program has all probes of a pod sent by one, and probes addresses of pods and
// of Services in each step. It prints a list of the cases' names after the word PLAN, and each case's result after the
// word RESULT, both as JSON.
package main

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/mattfenwick/cyclonus/pkg/connectivity"
	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	v1 "k8s.io/api/core/v1"
)

const (
	// Cyclonus's cases find each other by these names.
	names = "x y z"
	pods  = "a b c"
	// Policies are in force well within this time.
	waitSeconds = 1
	// A probe that is lost on a busy machine is sent again. What is wrong stays wrong.
	retries = 3
	// The equal VPC is looked at after so many cases.
	twinInterval = 20
)

func main() {
	focus := flag.String("focus", "", "run only cases whose name matches this regular expression")
	network := flag.String("network", "", "the network of the cases' pods; empty: the network default")
	twin := flag.String("twin", "", "a network with the same addresses, in which there are equal pods meanwhile")
	timeout := flag.Duration("timeout", time.Hour, "the limit of the whole run")
	flag.Parse()
	time.AfterFunc(*timeout, func() {
		fmt.Fprintln(os.Stderr, "the time of the run is over")
		os.Exit(1)
	})
	if err := run(*focus, *network, *twin); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(focus, network, twin string) error {
	pattern, err := regexp.Compile(focus)
	if err != nil {
		return err
	}
	cluster, err := connect(network, nil)
	if err != nil {
		return err
	}
	namespaces := append(strings.Fields(names), "y-2")
	if err := cluster.deleteNamespaces(namespaces); err != nil {
		return err
	}
	interpreter, resources, err := prepare(cluster, strings.Fields(names), true)
	if err != nil {
		return err
	}
	var beside *neighbour
	if twin != "" {
		if beside, err = newNeighbour(twin, cluster); err != nil {
			return err
		}
	}
	cases, err := planned(resources, pattern)
	if err != nil {
		return err
	}
	plan := []string{}
	for _, testCase := range cases {
		plan = append(plan, testCase.Description)
	}
	report("PLAN", plan)
	for index, testCase := range cases {
		tell(testCase.Description, interpreter.ExecuteTestCase(testCase))
		if beside != nil && (index%twinInterval == 0 || index+1 == len(cases)) {
			tell("equal VPC after "+testCase.Description, beside.check())
		}
	}
	if beside != nil {
		if err := beside.cluster.deleteNamespaces(beside.namespaces); err != nil {
			return err
		}
	}
	return cluster.deleteNamespaces(namespaces)
}

// prepare makes namespaces, pods and Services, and waits for them.
func prepare(cluster *cluster, namespaces []string, reset bool) (*connectivity.Interpreter, *probe.Resources, error) {
	// This kernel may have no SCTP sockets, so no pod serves by SCTP.
	protocols := []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP}
	resources, err := probe.NewDefaultResources(
		cluster, namespaces, strings.Fields(pods), []int{80, 81}, protocols, nil, 180, true, "")
	if err != nil {
		return nil, nil, err
	}
	config := &connectivity.InterpreterConfig{
		ResetClusterBeforeTestCase:       reset,
		VerifyClusterStateBeforeTestCase: reset,
		KubeProbeRetries:                 retries,
		PerturbationWaitSeconds:          waitSeconds,
		BatchJobs:                        true,
		// A pod always reaches itself.
		IgnoreLoopback: true,
	}
	return connectivity.NewInterpreter(cluster, resources, config), resources, nil
}

// planned returns cyclonus's cases, with each step's probes by addresses of pods and by Services.
func planned(resources *probe.Resources, focus *regexp.Regexp) ([]*generator.TestCase, error) {
	last, err := resources.GetPod("z", "c")
	if err != nil {
		return nil, err
	}
	generated := generator.NewTestCaseGenerator(true, last.IP, strings.Fields(names), nil, nil).GenerateTestCases()
	var cases []*generator.TestCase
	for index, testCase := range generated {
		// Some of cyclonus's descriptions are equal.
		name := fmt.Sprintf("%d: %s", index+1, testCase.Description)
		if !focus.MatchString(name) {
			continue
		}
		service := generator.ProbeMode(generator.ProbeModeServiceIP)
		if changesPods(testCase) {
			service = generator.ProbeModeServiceName
		}
		var steps []*generator.TestStep
		for _, step := range testCase.Steps {
			steps = append(steps,
				&generator.TestStep{Actions: step.Actions, Probe: by(generator.ProbeModePodIP, step.Probe)},
				&generator.TestStep{Probe: by(service, step.Probe)})
		}
		cases = append(cases, &generator.TestCase{Description: name, Tags: testCase.Tags, Steps: steps})
	}
	return cases, nil
}

// changesPods says whether the case makes pods or changes their labels. Cyclonus does not know the address of such a
// pod's Service, and would probe an empty address: that of the pod that sends.
func changesPods(testCase *generator.TestCase) bool {
	for _, step := range testCase.Steps {
		for _, action := range step.Actions {
			if action.CreatePod != nil || action.SetPodLabels != nil {
				return true
			}
		}
	}
	return false
}

func by(mode generator.ProbeMode, config *generator.ProbeConfig) *generator.ProbeConfig {
	changed := *config
	changed.Mode = mode
	return &changed
}
