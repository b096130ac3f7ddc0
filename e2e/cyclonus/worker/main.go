// Probes from inside a pod: what cyclonus's own worker does, without starting a program for each probe.
//
// It takes a batch as cyclonus writes it and prints a result for each request of it. A request is tried once. TCP: the
// connection is made. UDP: the server answers a datagram. Both are what `agnhost connect` does.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

const timeout = time.Second

// The types of cyclonus's package worker, which would bring the whole client of Kubernetes with it.
type (
	batch struct {
		Requests []*request
	}
	request struct {
		Key      string
		Protocol string
		Host     string
		Port     int
	}
	result struct {
		Request *request
		Error   string
	}
)

func main() {
	jobs := flag.String("jobs", "", "a batch of requests as JSON")
	flag.Parse()
	var taken batch
	if err := json.Unmarshal([]byte(*jobs), &taken); err != nil {
		fmt.Fprintln(os.Stderr, "reading the batch:", err)
		os.Exit(1)
	}
	results := make([]result, len(taken.Requests))
	var waiting sync.WaitGroup
	for index, request := range taken.Requests {
		waiting.Add(1)
		go func() {
			defer waiting.Done()
			results[index].Request = request
			if err := probe(request); err != nil {
				results[index].Error = err.Error()
			}
		}()
	}
	waiting.Wait()
	if err := json.NewEncoder(os.Stdout).Encode(results); err != nil {
		os.Exit(1)
	}
}

func probe(request *request) error {
	deadline := time.Now().Add(timeout)
	protocol, address := strings.ToLower(request.Protocol), net.JoinHostPort(request.Host, strconv.Itoa(request.Port))
	connection, err := net.DialTimeout(protocol, address, timeout)
	if err != nil {
		return err
	}
	defer connection.Close()
	if protocol == "tcp" {
		return nil
	}
	if err := connection.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := connection.Write([]byte("hostname\n")); err != nil {
		return err
	}
	_, err = connection.Read(make([]byte, 1024))
	return err
}
