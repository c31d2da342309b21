package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/daemon"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// asFaulty makes the test binary act as 'fared run' with faults that no input causes: its value is a folder with a
// configuration, faulty.yaml. A fault lasts while the folder has a file of its name.
const asFaulty = "FARED_TEST_AS_FAULTY"

// Faults of a daemon.
const (
	faultStuck = "stuck" // the loop does not return from a step
	faultSlow  = "slow"  // each step takes 150 ms
	faultPanic = "panic" // a reload panics
	faultFlood = "flood" // each step has 2,000 events without a change
)

// faulty is a source of links that are all up, which the loop queries in its steps.
type faulty struct {
	dir   string
	links []daemon.LinkEvent
	sent  bool
	ready chan struct{}
}

func (f *faulty) has(fault string) bool {
	_, err := os.Stat(filepath.Join(f.dir, fault))
	return err == nil
}

// Run implements daemon.LinkSource: it makes the loop step every 20 ms.
func (f *faulty) Run(ctx context.Context) error {
	for tick := time.NewTicker(20 * time.Millisecond); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return nil
		case <-tick.C:
			select {
			case f.ready <- struct{}{}:
			default:
			}
		}
	}
}

func (f *faulty) Ready() <-chan struct{} { return f.ready }
func (f *faulty) Poll()                  {}
func (f *faulty) Cover(string)           {}

func (f *faulty) Take(buf []daemon.LinkEvent) []daemon.LinkEvent {
	for f.has(faultStuck) {
		time.Sleep(10 * time.Millisecond)
	}
	if f.has(faultSlow) {
		time.Sleep(150 * time.Millisecond)
	}
	if !f.sent {
		f.sent = true
		return append(buf, f.links...)
	}
	if f.has(faultFlood) {
		for range 500 {
			buf = append(buf, f.links...)
		}
	}
	return buf
}

// beFaulty runs the daemon until SIGTERM.
func beFaulty(dir string) error {
	file := filepath.Join(dir, "faulty.yaml")
	cfg, err := config.Load(file)
	if err != nil {
		return err
	}
	f := &faulty{dir: dir, ready: make(chan struct{}, 1)}
	for i := range 4 {
		f.links = append(f.links, daemon.LinkEvent{SubPort: i, Up: true, Speed: 400 * fare.Gigabit, SpeedSource: "config"})
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return serve(ctx, cfg, daemon.Deps{
		Logger: cli.NewLogger(os.Stderr, slog.LevelInfo), LogLevel: new(slog.LevelVar), ConfigPath: file, Links: f,
		Override: func(*config.Config) {
			if f.has(faultPanic) {
				panic("a fault of the test")
			}
		},
	})
}

// TestPrometheusFaultyDaemon runs Prometheus with fared's rules next to a daemon whose loop is slow or stuck, or whose
// calls panic: each fires its alert, which ends with it.
func TestPrometheusFaultyDaemon(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "a daemon whose metrics are wrong")
	b := newPrometheusBed(t, "")
	b.interval = "3s" // a scrape waits two seconds for a stuck loop
	b.runs["server0"].Kill()
	text, err := os.ReadFile(filepath.Join(b.dir, "server0.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(b.dir, "server0")
	disk, fill := smallDisk(t, filepath.Join(b.dir, "disk"), 64<<10)
	b.write("faulty.yaml", fmt.Sprintf("%sapi: {socket: %s}\nrecord: {file: %s}\n", text, socket, filepath.Join(disk, "record.jsonl")))
	self := executable(t)
	b.runs["server0"] = b.nodes["server0"].Start(t, "env", asFaulty+"="+b.dir, self)
	b.ready()
	fault := func(name string, act func(), want ...string) {
		t.Helper()
		path := filepath.Join(b.dir, name)
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		act()
		b.firing(want...)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		b.firing()
	}
	fault(faultStuck, func() {}, "FaredLoopStuck")
	fault(faultSlow, func() {}, "FaredLoopSlow")
	fault(faultPanic, func() {
		if o := fared(t, "--socket", socket, "reload"); o.Code == cli.ExitOK {
			t.Errorf("a reload that panics: %s", o.Out)
		}
	}, "FaredPanic")
	free := fill()
	fault(faultFlood, func() {}, "FaredRecordingIncomplete") // it keeps 8 MiB of events until there is room
	free()
	b.weights("1:1")
	netnstest.Eventually(t, time.Minute, b.runs["server0"].Running)
}
