package main

import (
	"encoding/json"
	"fmt"
	"sort"

	"github.com/mattfenwick/cyclonus/pkg/connectivity"
)

// The number of differences that a result names.
const mostReasons = 5

// A result is what the caller gets of a case.
type result struct {
	Name   string `json:"name"`
	Passed bool   `json:"passed"`
	// Probes that ended as expected, and all probes, of the last try of each step.
	Right int `json:"right"`
	All   int `json:"all"`
	// The most tries that a step took.
	Tries int `json:"tries"`
	// What differed in the last try of a step.
	Why []string `json:"why"`
	// What differed in the first try of a step that passed later.
	First []string `json:"first,omitempty"`
}

// tell prints the result of a case.
func tell(name string, ran *connectivity.Result) {
	told := result{Name: name, Passed: ran.Err == nil && ran.Passed(true), Why: []string{}}
	if ran.Err != nil {
		told.Why = append(told.Why, ran.Err.Error())
	}
	for index, step := range ran.Steps {
		told.Tries = max(told.Tries, len(step.KubeProbes))
		compared, differences := compare(step.LastComparison())
		told.All += compared
		told.Right += compared - len(differences)
		told.Why = append(told.Why, ofStep(index, differences)...)
		if len(differences) == 0 {
			_, first := compare(step.Comparison(0))
			told.First = append(told.First, ofStep(index, first)...)
		}
	}
	told.Why, told.First = cut(told.Why), cut(told.First)
	report("RESULT", told)
}

func ofStep(index int, differences []string) []string {
	told := []string{}
	for _, difference := range differences {
		told = append(told, fmt.Sprintf("step %d: %s", index+1, difference))
	}
	return told
}

func cut(differences []string) []string {
	if hidden := len(differences) - mostReasons; hidden > 0 {
		return append(differences[:mostReasons], fmt.Sprintf("and %d more", hidden))
	}
	return differences
}

// report prints a line for the caller.
func report(word string, what any) {
	line, err := json.Marshal(what)
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s %s\n", word, line)
}

// compare returns the number of probes between different pods, and those that ended otherwise than expected.
func compare(comparison *connectivity.ComparisonTable) (int, []string) {
	compared, differences := 0, []string{}
	for _, key := range comparison.Wrapped.Keys() {
		if key.From == key.To {
			continue
		}
		item := comparison.Get(key.From, key.To)
		for port, actual := range item.Kube.JobResults {
			compared++
			if expected := item.Simulated.JobResults[port].Combined; actual.Combined != expected {
				differences = append(differences, fmt.Sprintf(
					"%s to %s %s is %s, not %s", key.From, key.To, port, actual.Combined, expected))
			}
		}
	}
	sort.Strings(differences)
	return compared, differences
}
