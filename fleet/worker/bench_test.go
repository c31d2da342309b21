package worker

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// fleet is 2,048 servers with 8 GPUs on 8 planes.
var fleet = topo.Spec{Planes: 8, Servers: 2048, GPUs: 8, Leaves: 32, Spines: 16}

// usage returns the memory in use and the processor time of this process.
func usage() (bytes uint64, processor time.Duration) {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	var r unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &r)
	return m.HeapAlloc + m.StackInuse, time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// daemonsAt is the environment variable that makes this program the daemons of the fleet, which report to the worker at
// its value until the end of the standard input.
const daemonsAt = "FARED_FLEET_DAEMONS_AT"

func TestMain(m *testing.M) {
	address := os.Getenv(daemonsAt)
	if address == "" {
		os.Exit(m.Run())
	}
	f, err := topo.New(fleet)
	if err != nil {
		panic(err) // a constant
	}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	for _, n := range f.Server {
		done.Go(func() {
			simulated(ctx, f, n, []string{address}, grpc.WithReadBufferSize(buffer), grpc.WithWriteBufferSize(buffer))
		})
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // until the parent's end
	cancel()
	done.Wait()
}

// BenchmarkFleet connects 2,048 simulated daemons of another process to a worker, and to its successor after its end.
// The processor time at rest is that of ten seconds.
func BenchmarkFleet(b *testing.B) {
	f := number(b, fleet)
	for b.Loop() {
		l := listen(b)
		address := l.Addr().String()
		before, _ := usage()
		w, stop := serve(b, f, l)
		daemons := exec.Command(os.Args[0])
		daemons.Env = append(os.Environ(), daemonsAt+"="+address)
		in, err := daemons.StdinPipe()
		if err == nil {
			err = daemons.Start()
		}
		if err != nil {
			b.Fatal(err)
		}
		begun := time.Now()
		until(b, "all daemons report", func() bool { return len(w.reports()) == f.Servers })
		b.ReportMetric(time.Since(begun).Seconds(), "s/connect")
		time.Sleep(10 * time.Second) // for the decision
		after, busy := usage()
		b.ReportMetric(float64(after-before)/float64(f.Servers)/1024, "KiB/daemon")
		time.Sleep(10 * time.Second)
		_, later := usage()
		b.ReportMetric(float64(later-busy)/1e8, "%core")
		stop()
		begun = time.Now()
		if l, err = net.Listen("tcp4", address); err != nil {
			b.Fatal(err)
		}
		w, stop = serve(b, f, l)
		until(b, "all daemons report again", func() bool { return len(w.reports()) == f.Servers })
		b.ReportMetric(time.Since(begun).Seconds(), "s/reconnect")
		in.Close()
		if err := daemons.Wait(); err != nil {
			b.Error(err)
		}
		stop()
	}
}

// BenchmarkNamed measures the time from a lost carrier at a real daemon until a worker names the cable.
func BenchmarkNamed(b *testing.B) {
	f := number(b, topo.Spec{Planes: 2, Servers: 3, Underlay: netip.MustParsePrefix("127.0.0.0/8")})
	l := listen(b)
	serve(b, f, l)
	client := ask(b, l.Addr().String())
	fabric := daemons(b, f, l.Addr().String())
	until(b, "all nodes report", func() bool {
		m, err := client.GetFleet(b.Context(), &fleetv1.GetFleetRequest{}, grpc.WaitForReady(true))
		return err == nil && m.ServersReporting == 3 && m.SwitchesReporting == 2 && len(m.Faults) == 0
	})
	for b.Loop() {
		for _, connected := range []bool{false, true} {
			if connected {
				b.StopTimer()
			}
			if err := fabric.SetCables(b.Context(), []backend.Cable{{Cable: f.Cables[0], Connected: connected}}); err != nil {
				b.Fatal(err)
			}
			until(b, "the cable is named, or no longer", func() bool { return (len(faults(b, client)) == 0) == connected })
		}
		b.StartTimer()
	}
}

// BenchmarkAllFailures measures the simulation of all single and of all double failures by one worker: 2,048 servers of
// 8 GPUs, 4 planes of 16 leaves and 8 spines.
func BenchmarkAllFailures(b *testing.B) {
	f := number(b, topo.Spec{Planes: 4, Servers: 2048, GPUs: 8, Leaves: 16, Spines: 8})
	w := New(Config{Fabric: f})
	for name, double := range map[string]bool{"single": false, "double": true} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := w.answerWhatIf(b.Context(), &fleetv1.WhatIfRequest{AllSingle: !double, AllDouble: double}, &progress{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
