// A collector of traces for tests: takes spans by OTLP over HTTP with the OpenTelemetry collector's own receiver, and
// prints each request that the receiver has understood as a line of JSON. Its argument is the address where it listens.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	metric "go.opentelemetry.io/otel/metric/noop"
	trace "go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/zap"
)

type host struct{}

func (host) GetExtensions() map[component.ID]component.Component {
	return nil
}

func printSpans(_ context.Context, spans ptrace.Traces) error {
	line, err := (&ptrace.JSONMarshaler{}).MarshalTraces(spans)
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(append(line, '\n'))
	return err
}

func run(address string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	factory := otlpreceiver.NewFactory()
	config := factory.CreateDefaultConfig()
	http := map[string]any{"endpoint": address}
	settings := confmap.NewFromStringMap(map[string]any{"protocols": map[string]any{"http": http}})
	if err := settings.Unmarshal(config); err != nil {
		return err
	}
	printer, err := consumer.NewTraces(printSpans)
	if err != nil {
		return err
	}
	server, err := factory.CreateTraces(ctx, receiver.Settings{
		ID: component.NewID(factory.Type()),
		TelemetrySettings: component.TelemetrySettings{
			Logger:         zap.NewNop(),
			TracerProvider: trace.NewTracerProvider(),
			MeterProvider:  metric.NewMeterProvider(),
			Resource:       pcommon.NewResource(),
		},
	}, config, printer)
	if err != nil {
		return err
	}
	if err := server.Start(ctx, host{}); err != nil {
		return err
	}
	<-ctx.Done()
	return server.Shutdown(context.Background())
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: otlp ADDRESS:PORT")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
