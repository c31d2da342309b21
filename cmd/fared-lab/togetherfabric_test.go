package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
	"github.com/fared/fared/internal/testkit/testbed"
)

// together are the transports of TestTransportsTogether, with the services to which their packets go.
var together = []struct {
	transport, service string
	protocol           uint8
	port               uint16
}{
	{"roce", "udp/4791", unix.IPPROTO_UDP, 4791},
	{"superp", "udp/4444", unix.IPPROTO_UDP, 4444},
	{"tcp", "tcp/4793", unix.IPPROTO_TCP, 4793},
}

// servers are those of TestTransportsTogether, by their numbers in the leaves' devices.
var servers = []string{"1", "2"}

// place is a sub-port of a server in a lab.
type place struct{ plane, subPort int }

const leavesOfLab, subPortsOfLab = 4, 2

// TestTransportsTogether runs three transports at once between two servers of a lab, with both drivers. At the leaves
// every packet arrives by the sub-port of the slot whose source port it has for its service. With driver linux the
// source ports for one service would lead packets of the others elsewhere. FARED_TOGETHER_SIZE is the size of the data
// that each server sends with each transport, 16M by default.
func TestTransportsTogether(t *testing.T) {
	gate.Slow(t, gate.Labs, "three transports, with both drivers")
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) { transportsTogether(t, driver) })
	}
}

func transportsTogether(t *testing.T, driver string) {
	netnstest.Require(t)
	lab := testbed.NewLab(t, "--servers", "2", "--driver", driver)

	// Where a packet belongs, by server, service and source port: plane and sub-port.
	var places [2][3]map[int]place
	var taps [2][3][leavesOfLab][subPortsOfLab]*packettap.Tap
	for i, server := range servers {
		for k := range together {
			places[i][k] = slotPlaces(t, lab.Socket("server"+server), "10.255.0."+servers[1-i]+"/32", together[k].service)
			for p := range leavesOfLab {
				for s := range subPortsOfLab {
					leaf, device := lab.Node(fmt.Sprint("leaf", p)), fmt.Sprintf("s%s.%d", server, s)
					taps[i][k][p][s] = packettap.NewFiltered(t, leaf, device, together[k].port, packettap.Pass, packettap.Filter{Protocol: together[k].protocol})
				}
			}
		}
	}
	var runs []*exec.Cmd
	var logs [3]strings.Builder
	for k, x := range together {
		run := []string{"traffic", "run", "--size", cmp.Or(os.Getenv("FARED_TOGETHER_SIZE"), "16M"), "--ordering", "weak"}
		for _, server := range servers {
			socket := "unix:" + filepath.Join(t.TempDir(), "node.sock")
			node := lab.Node("server"+server).Start(t, binary.Lab(t), "traffic", "node", "--transport", x.transport, "--socket", lab.Socket("server"+server),
				"--source", "10.255.0."+server, "--connect-port", fmt.Sprint(5000+k), "--listen", socket)
			node.AwaitText(t, "listens at")
			run = append(run, "--node", server+"="+socket)
		}
		cmd := exec.Command(binary.Lab(t), run...)
		cmd.Stdout, cmd.Stderr = &logs[k], &logs[k]
		runs = append(runs, cmd)
	}
	var wait sync.WaitGroup
	errs := make([]error, len(runs))
	for k, cmd := range runs {
		wait.Go(func() { errs[k] = cmd.Run() })
	}
	wait.Wait()
	for k, x := range together {
		if errs[k] != nil || !strings.Contains(logs[k].String(), "every byte verified") {
			t.Errorf("%s: %v\n%s", x.transport, errs[k], logs[k].String())
		}
		for i := range servers {
			var landed, strays, others uint64
			used := map[place]bool{}
			for p := range leavesOfLab {
				for s := range subPortsOfLab {
					for port, n := range taps[i][k][p][s].Read(t) {
						if n == 0 {
							continue
						}
						if at, ok := places[i][k][port]; ok && at == (place{p, s}) {
							landed += n
							used[at] = true
						} else {
							strays += n
						}
						if at, ok := places[i][(k+1)%len(together)][port]; !ok || at != (place{p, s}) {
							others += n
						}
					}
				}
			}
			t.Logf("%s from server%s: %d packets by the sub-ports of their slots, %d elsewhere; by the source ports of %s %d would be elsewhere", x.transport, servers[i], landed, strays, together[(k+1)%len(together)].transport, others)
			if strays > 0 || len(used) != leavesOfLab*subPortsOfLab {
				t.Errorf("%s from server%s: %d packets arrive elsewhere than at the sub-ports of their slots; %d sub-ports carry it", x.transport, servers[i], strays, len(used))
			}
			if driver == "linux" && others == 0 {
				t.Error("the source ports of another service would do, too: this test has lost its subject")
			}
		}
	}
}

// slotPlaces reads where the packets of each source port for a service belong, from `fared weights`.
func slotPlaces(t *testing.T, socket, destination, service string) map[int]place {
	t.Helper()
	out, err := exec.Command(binary.Fared(t), "--socket", socket, "weights", "--service", service, "-o", "json").Output()
	if err != nil {
		t.Fatal(err)
	}
	var list struct {
		Destinations []struct {
			Destination string
			Pairs       []struct {
				Slots    []struct{ Device string }
				Services []struct {
					Ports []int `json:"source_ports"`
				}
			}
		}
	}
	if err := json.Unmarshal(out, &list); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	places := map[int]place{}
	for _, d := range list.Destinations {
		if d.Destination != destination {
			continue
		}
		for i, s := range d.Pairs[0].Slots {
			var at place
			if _, err := fmt.Sscanf(s.Device, "p%d.%d", &at.plane, &at.subPort); err != nil {
				t.Fatal(err)
			}
			places[d.Pairs[0].Services[0].Ports[i]] = at
		}
	}
	if len(places) == 0 {
		t.Fatalf("no slots to %s:\n%s", destination, out)
	}
	return places
}
