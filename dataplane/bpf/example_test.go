package bpf_test

import (
	"log"

	"github.com/fared/fared/dataplane/bpf"
)

// Example adopts the steering of an earlier process, counts its packets and leaves it in place: packets are steered
// while no process runs. It needs CAP_BPF and CAP_NET_ADMIN.
func Example() {
	if err := bpf.Supported(); err != nil {
		log.Fatal(err)
	}
	steering, err := bpf.Open(bpf.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer steering.Close()
	stats, err := steering.Stats()
	if err != nil {
		log.Print(err)
	}
	log.Printf("%+v", stats)
}
