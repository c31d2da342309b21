package daemon

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/internal/grpcserve"
	"github.com/fared/fared/internal/httpserve"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// descriptors counts the open files of this process.
func descriptors(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// TestIdleConnectionsOnEveryListener opens a thousand connections on each listener, in the state that each server keeps
// longest: the daemon accepts no more than its limits, a scrape is answered, and a BGP session that ends comes up
// again.
func TestIdleConnectionsOnEveryListener(t *testing.T) {
	const n = 1000
	dir := testbed.ShortDir(t)
	operate, read := filepath.Join(dir, "s"), filepath.Join(dir, "ro")
	api, metrics, page := netnstest.FreePort(t), netnstest.FreePort(t), netnstest.FreePort(t)
	r := newRig(t, shape{Planes: 1, SubPorts: 1, Extra: fmt.Sprintf("slots: {file: none}\ndrains: {file: none}\n"+
		"api: {socket: %s, read_only_socket: %s, listen: \"127.0.0.1:%d\"}\nmetrics: {listen: \"127.0.0.1:%d\"}\nui: {listen: \"127.0.0.1:%d\"}\n", operate, read, api, metrics, page)},
		rigOptions{leaves: announceAll(400e9, 1), deps: func(d *Deps) { d.Embedded = false }})
	r.settled(1)
	before := descriptors(t)
	const pageLimit = 96
	get, preface := "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	opened := 0
	for _, c := range []struct{ network, address, send string }{
		{"unix", operate, preface}, {"unix", read, preface}, {"tcp", fmt.Sprintf("127.0.0.1:%d", api), preface},
		{"tcp", fmt.Sprintf("127.0.0.1:%d", metrics), get}, {"tcp", fmt.Sprintf("127.0.0.1:%d", page), get},
	} {
		for range n {
			conn, err := net.Dial(c.network, c.address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_, _ = conn.Write([]byte(c.send)) // those beyond the share of this user are closed
			opened++
		}
	}
	client := http.Client{Timeout: waitLimit}
	defer client.CloseIdleConnections()
	resp, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", metrics))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("a scrape: %s", resp.Status)
	}
	const most = 3*grpcserve.MaxClientConnections + httpserve.MaxConnections + pageLimit
	// A few more are open for moments: the session, and connections that are being replaced.
	const moments = 32
	accepted := func() int { return descriptors(t) - before - opened }
	eventually(t, "many connections are accepted", func() bool { return accepted() >= most/2 })
	if n := accepted(); n > most+moments {
		t.Errorf("the daemon has %d open files for %d connections, want at most %d", n, opened, most)
	}
	was := r.d.speaker.Status(0).Generation
	r.leaves[0].drop()
	eventually(t, "the session is up again", func() bool {
		st := r.d.speaker.Status(0)
		return st.Generation > was && st.State == speaker.Established
	})
}
