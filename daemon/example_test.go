package daemon_test

import (
	"fmt"
	"strings"

	"github.com/fared/fared/daemon"
)

// A recording of a daemon replays to the weights with which it ended.
func ExampleReplay() {
	recording, err := daemon.OpenRecording("internal/core/testdata/recording-66b364c.jsonl")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer recording.Close()
	events := 0
	core, err := daemon.Replay(recording, func(daemon.Replayed) { events++ })
	if err != nil {
		fmt.Println(err)
		return
	}
	weights, err := daemon.Weights(core)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(events, "events")
	for _, w := range weights {
		var planes []string
		for _, p := range w.Planes {
			planes = append(planes, fmt.Sprintf("%s=%d", p.Plane, p.Weight))
		}
		fmt.Println(w.Destination, strings.Join(planes, " "))
	}
	// Output:
	// 58 events
	// 10.255.1.0/32 p0=1 p1=0 p2=1 p3=0
	// 10.255.1.1/32 p0=1 p1=0 p2=2 p3=0
	// 10.255.1.2/32 p0=1 p1=0 p2=2 p3=0
}
