package nupa

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestMixedPlanes has a fabric of two servers and two planes: leaf "memory" joins the servers by nupanet cables of 200
// Gbit/s, leaf "ethernet" by veth pairs of 100 Gbit/s. UDP packets with many ports go from one server to the other by
// the weights that fared has given the kernel: two thirds through memory. When the memory cable behind the leaf is
// lost, all go by Ethernet; when it returns, two thirds again. The kernel counts the packets at the far server's
// devices.
func TestMixedPlanes(t *testing.T) {
	gate.Slow(t, gate.Labs, "a fabric with a plane of memory")
	netnstest.Require(t, "sysctl")
	dir := t.TempDir()
	servers := [2]*netnstest.Namespace{netnstest.New(t), netnstest.New(t)}
	leaves := [2]*netnstest.Namespace{netnstest.New(t), netnstest.New(t)}
	for _, ns := range append(servers[:], leaves[:]...) {
		ns.SetApart()
		for _, key := range []string{"net.ipv4.ip_forward", "net.ipv4.fib_multipath_hash_policy", "net.ipv4.conf.all.ignore_routes_with_linkdown"} {
			ns.Sysctl(key + "=1")
		}
	}
	// cable starts an end of the nupanet cable of a server: 1 at the server, 2 at the leaf.
	cable := func(server, end int) *netnstest.Process {
		ns, device := servers[server], "m0"
		if end == 2 {
			ns, device = leaves[0], fmt.Sprint("m", server)
		}
		p := ns.Start(t, binary.Lab(t), "nupanet", "--nupa-shared", "--nupa-file", filepath.Join("/dev/shm", fmt.Sprintf("fared-mixed-%d-%d", os.Getpid(), server)), "--nupa-size", "32MiB",
			"--nupa-dead-after", "500ms", "--device", device, "--local", fmt.Sprint("192.0.2.", end), "--peer", fmt.Sprint("192.0.2.", 3-end))
		netnstest.Eventually(t, time.Minute, func() error {
			if out, err := ns.Output("ip", "addr", "replace", fmt.Sprintf("10.1.%d.%d/30", server, end), "dev", device); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return p.Running()
		})
		ns.IP("link", "set", device, "txqueuelen", "20000") // packets wait for the process on a busy machine
		return p
	}
	var far *netnstest.Process
	for i := range servers {
		t.Cleanup(func() { os.Remove(filepath.Join("/dev/shm", fmt.Sprintf("fared-mixed-%d-%d", os.Getpid(), i))) })
		cable(i, 1)
		far = cable(i, 2)
		servers[i].IP("link", "set", "lo", "up")
		servers[i].IP("addr", "add", fmt.Sprintf("10.255.0.%d/32", i+1), "dev", "lo")
		leafEnd := fmt.Sprint("e", i)
		netnstest.Cable(t, servers[i], "e0", fmt.Sprintf("10.2.%d.1/30", i), leaves[1], leafEnd, fmt.Sprintf("10.2.%d.2/30", i))
	}
	run := func(ns *netnstest.Namespace, command, name, text string) {
		text += fmt.Sprintf("accept: [10.255.0.0/16]\nbgp: {connect_retry: 200ms}\napi: {socket: %q}\n", filepath.Join(dir, name+".sock")) +
			fmt.Sprintf("dataplane: {address: \"inside:\", flags: [\"--driver=linux\", \"--journal=none\", \"--socket=%s\"]}\n", filepath.Join(dir, name+".dp"))
		path := filepath.Join(dir, name+".yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		ns.Start(t, binary.Fared(t), command, "--config", path)
	}
	speeds := [2]string{"200G", "100G"}
	for p, plane := range []string{"memory", "ethernet"} {
		text := fmt.Sprintf("role: leaf\nrouter_id: 10.0.0.%d\nas: %d\nplanes:\n- name: %s\n  sub_ports:\n", p+1, 65000+p, plane)
		for i := range servers {
			text += fmt.Sprintf("  - {device: %s%d, speed: %s, sessions: [{peer: 10.%d.%d.1, local: 10.%[4]d.%[5]d.2, peer_as: %d, passive: true, families: [ipv4]}]}\n",
				plane[:1], i, speeds[p], p+1, i, 65100+i)
		}
		run(leaves[p], "leaf", plane, text)
	}
	for i, ns := range servers {
		text := fmt.Sprintf("router_id: 10.255.0.%d\nas: %d\nloopbacks: [10.255.0.%[1]d/32]\nplanes:\n", i+1, 65100+i)
		for p, plane := range []string{"memory", "ethernet"} {
			text += fmt.Sprintf("- {name: %s, sub_ports: [{device: %s0, speed: %s, sessions: [{peer: 10.%d.%d.2, local: 10.%[4]d.%[5]d.1, peer_as: %d, families: [ipv4]}]}]}\n",
				plane, plane[:1], speeds[p], p+1, i, 65000+p)
		}
		run(ns, "run", fmt.Sprint("server", i), text)
	}

	arrived := func(device string) int {
		t.Helper()
		var links []struct {
			Stats64 struct{ RX struct{ Packets int } }
		}
		if err := json.Unmarshal([]byte(servers[1].IP("-json", "-statistics", "link", "show", "dev", device)), &links); err != nil || len(links) != 1 {
			t.Fatalf("%d devices %s: %v", len(links), device, err)
		}
		return links[0].Stats64.RX.Packets
	}
	// await sends packets until the memory plane has a share of those that arrive, in per cent.
	await := func(want float64) {
		t.Helper()
		const packets = 20000
		netnstest.Eventually(t, 60*time.Second, func() error {
			before := [2]int{arrived("m0"), arrived("e0")}
			if err := servers[0].Do(func() error { return send(packets) }); err != nil {
				return err
			}
			var memory, ethernet int
			for end := time.Now().Add(5 * time.Second); memory+ethernet < packets && time.Now().Before(end); time.Sleep(10 * time.Millisecond) { // they wait in queues
				memory, ethernet = arrived("m0")-before[0], arrived("e0")-before[1]
			}
			if total := memory + ethernet; total < packets*9/10 {
				return fmt.Errorf("%d of %d packets have arrived", total, packets)
			}
			// A share of random flows has a standard deviation of 0.33 points; BGP's packets are fewer.
			if share := 100 * float64(memory) / float64(memory+ethernet); share < want-1.5 || share > want+1.5 {
				return fmt.Errorf("memory carries %.1f %%, want %.1f %%", share, want)
			}
			t.Logf("%d packets through memory, %d by Ethernet", memory, ethernet)
			return nil
		})
	}
	await(100.0 * 2 / 3)
	far.Kill()
	await(0)
	cable(1, 2)
	await(100.0 * 2 / 3)
}

// send sends UDP packets with different ports.
func send(packets int) error {
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(10, 255, 0, 1)})
	if err != nil {
		return err
	}
	defer c.Close()
	for i := range packets {
		if _, err := c.WriteToUDP(make([]byte, 64), &net.UDPAddr{IP: net.IPv4(10, 255, 0, 2), Port: 1024 + i}); err != nil {
			return err
		}
	}
	return nil
}
