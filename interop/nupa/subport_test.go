package nupa

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestSubPort makes a plane whose sub-port is a nupanet device: a server and its leaf, in two namespaces, have a BGP
// session through shared memory. When the leaf's end is killed the server's sub-port loses its carrier, and with it the
// session; both return.
func TestSubPort(t *testing.T) {
	gate.Needed(t, "a BGP session over shared memory ends and returns with its carrier")
	for _, flag := range []string{"--nupa-shared", "--non-coherent"} {
		t.Run(flag, func(t *testing.T) {
			if flag != "--nupa-shared" {
				gate.Slow(t, gate.Labs, "memory without coherence")
			}
			subPort(t, flag)
		})
	}
}

func subPort(t *testing.T, flag string) {
	netnstest.Require(t)
	b := newBed(t)
	server, leaf := netnstest.New(t), netnstest.New(t)
	cable := func(ns *netnstest.Namespace, end int) *netnstest.Process {
		p := ns.Start(t, binary.Lab(t), "nupanet", "--nupa-file", b.memory.Name(), flag,
			"--local", fmt.Sprint("192.0.2.", end), "--peer", fmt.Sprint("192.0.2.", 3-end))
		netnstest.Eventually(t, time.Minute, func() error {
			if out, err := ns.Output("ip", "addr", "replace", fmt.Sprintf("10.1.0.%d/30", end), "dev", "nupanet0"); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return p.Running()
		})
		return p
	}
	cable(server, 1)
	far := cable(leaf, 2)
	configure := func(name, text string) (config, socket string) {
		config, socket = filepath.Join(b.dir, name+".yaml"), filepath.Join(b.dir, name+".sock")
		text += fmt.Sprintf("accept: [10.255.0.0/16]\nstart: {deadline: 1s}\nbgp: {connect_retry: 200ms}\ndataplane: {address: \"memory:\"}\napi: {socket: %q}\n", socket)
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return config, socket
	}
	const port = "planes: [{name: p0, sub_ports: [{device: nupanet0, speed: 100G, sessions: [{%s, families: [ipv4]}]}]}]\n"
	config, socket := configure("server", "role: server\nrouter_id: 10.255.0.1\nas: 65001\nloopbacks: [10.255.0.1/32]\n"+
		fmt.Sprintf(port, "peer: 10.1.0.2, local: 10.1.0.1, peer_as: 65000"))
	server.Start(t, binary.Fared(t), "run", "--config", config)
	config, _ = configure("leaf", "role: leaf\nrouter_id: 10.1.0.2\nas: 65000\n"+fmt.Sprintf(port, "peer: 10.1.0.1, local: 10.1.0.2, peer_as: 65001, passive: true"))
	leaf.Start(t, binary.Fared(t), "leaf", "--config", config)
	awaitSession := func(established bool) {
		t.Helper()
		netnstest.Eventually(t, 60*time.Second, func() error {
			out, err := exec.Command(binary.Fared(t), "sessions", "--socket", socket, "-o", "json").CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			var answer struct{ Sessions []struct{ State string } }
			if err := json.Unmarshal(out, &answer); err != nil {
				return err
			}
			if len(answer.Sessions) != 1 || strings.EqualFold(answer.Sessions[0].State, "established") != established {
				return fmt.Errorf("sessions %v, want established: %v", answer.Sessions, established)
			}
			return nil
		})
	}
	awaitSession(true)
	far.Kill()
	awaitSession(false)
	cable(leaf, 2)
	awaitSession(true)
}
