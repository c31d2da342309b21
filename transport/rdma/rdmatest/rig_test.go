package rdmatest

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// harsh returns a network that reveals every fault.
func harsh(seed uint64) Options {
	return Options{Seed: seed, Ops: 3000, Window: 12, Loss: 0.05, Duplicate: 0.05, Corrupt: 0.02, NotReady: 0.1, Flap: 10 * time.Millisecond}
}

func TestChannelsSoundToy(t *testing.T) {
	for seed := range uint64(seeds) {
		result := Channels(t, newToy(sound), harsh(seed))
		if result.Ops < 3000 || result.Net.Lost == 0 || result.Net.Corrupted == 0 || result.Net.Duplicated == 0 {
			t.Fatalf("seed %d: %+v", seed, result)
		}
	}
}

func TestChannelsSoundToyHolding(t *testing.T) {
	for seed := range uint64(seeds) {
		Channels(t, newHoldingToy, harsh(seed))
	}
}

// TestChannelsCatchesFaults runs transports that each have one fault.
func TestChannelsCatchesFaults(t *testing.T) {
	reports := map[toyFault]string{
		loses:           "is not in memory|has not been delivered|was seen twice|the word was",
		executesTwice:   "admitted again|was seen twice|the word was|is not outstanding",
		completesEarly:  "is not in memory",
		completesTwice:  "completed twice",
		neverCompletes:  "no operation has completed",
		swaps:           "posted first",
		believesAll:     "is not in memory|is not what memory was|different contents",
		ignoresNotReady: "not admitted",
		staysOnPath:     "no operation has completed",
		swallowsSends:   "has not been delivered",
		writesBeyond:    "behind its Local",
		writesShort:     "is not in memory",
		forgetsRoom:     "no operation has completed",
		storms:          "Room was called",
		leaksOnClose:    "its channel is closed",
		keepsBytes:      "is not in memory",
		countsWrong:     "Path.Sent",
		fails:           "remote operational error",
	}
	for fault := sound + 1; fault < toyFaults; fault++ {
		t.Run(fault.String(), func(t *testing.T) {
			o := harsh(1)
			switch fault {
			case neverCompletes, forgetsRoom:
				o.Idle, o.Outage = 3*time.Second, 100*time.Millisecond
			case countsWrong:
				o.Kinds = []rdma.OpKind{rdma.OpWrite}
			case staysOnPath:
				// Planes come back in the end; the test must show that no operation waits for that.
				o.Outage, o.Idle, o.Flap = time.Minute, 3*time.Second, 2*time.Millisecond
			}
			_, err := RunChannels(Virtual(o.withDefaults().net(), newToy(fault)), o)
			if err == nil {
				t.Fatal("it was not noticed")
			}
			for _, want := range strings.Split(reports[fault], "|") {
				if strings.Contains(err.Error(), want) {
					t.Log(err)
					return
				}
			}
			t.Errorf("noticed as: %v; want %q", err, reports[fault])
		})
	}
}

// TestChannelsSoundToyLongOutages checks that no operation waits for a plane to come back.
func TestChannelsSoundToyLongOutages(t *testing.T) {
	for seed := range uint64(seeds) {
		o := harsh(seed)
		o.Outage, o.Idle = time.Minute, 3*time.Second
		Channels(t, newToy(sound), o)
	}
}

// TestChannelsRepeats checks that equal options give equal runs.
func TestChannelsRepeats(t *testing.T) {
	o := harsh(7)
	first, second := Channels(t, newToy(sound), o), Channels(t, newToy(sound), o)
	if first.Net != second.Net || first.Time != second.Time || first.Net.Sent == 0 {
		t.Errorf("one run: %+v %v, the other: %+v %v", first.Net, first.Time, second.Net, second.Time)
	}
}

// TestScriptsCatchFaults checks that random scripts of the fuzzer reveal faulty transports.
func TestScriptsCatchFaults(t *testing.T) {
	scripts := func(fault toyFault, count int) error {
		rng := rand.New(rand.NewPCG(1, 2))
		for range count {
			script := make([]byte, 800)
			for i := range script {
				script[i] = byte(rng.Uint32())
			}
			if err := play(newToy(fault), FuzzOptions{Checksum: true}, script); err != nil {
				return err
			}
		}
		return nil
	}
	if err := scripts(sound, 2*seeds); err != nil {
		t.Errorf("a sound transport: %v", err)
	}
	for fault := sound + 1; fault < toyFaults; fault++ {
		if err := scripts(fault, 100); err == nil {
			t.Errorf("%v was not noticed", fault)
		}
	}
}

func FuzzToy(f *testing.F) { Fuzz(f, newHoldingToy, FuzzOptions{Checksum: true}) }
