package tlsfiles

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// TestRotation checks over gRPC that both ends use replaced files from the next connection on, that they use the old
// ones while the new ones do not fit together, and report that once, and that connections outlast a replacement.
func TestRotation(t *testing.T) {
	made := t.TempDir() // certificates of two authorities, old and new
	for _, age := range []string{"old", "new"} {
		ca, key := issue(t, made, age+"-ca", nil, nil)
		issue(t, made, age+"-server", ca, key)
		issue(t, made, age+"-client", ca, key)
	}
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	// put replaces a file as a tool for secrets does: by a rename.
	put := func(name, from string) {
		t.Helper()
		content, err := os.ReadFile(filepath.Join(made, from))
		if err != nil {
			t.Fatal(err)
		}
		write(t, file(name+".tmp"), content)
		if err := os.Rename(file(name+".tmp"), file(name)); err != nil {
			t.Fatal(err)
		}
	}
	replace := func(end, age string) {
		t.Helper()
		put(end+".crt", age+"-"+end+".crt")
		put(end+".key", age+"-"+end+".key")
	}
	for _, end := range []string{"server", "client"} {
		replace(end, "old")
		put(end+"-ca.crt", "old-ca.crt")
	}
	var log bytes.Buffer
	config, err := Server(file("server.crt"), file("server.key"), file("server-ca.crt"), slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	creds, err := Credentials(file("client.crt"), file("client.key"), file("client-ca.crt"), nil)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(config)))
	healthpb.RegisterHealthServer(server, health.NewServer())
	served := make(chan error)
	go func() { served <- server.Serve(l) }()
	defer func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	check := func(conn *grpc.ClientConn) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
		return err
	}
	open := func() *grpc.ClientConn {
		t.Helper()
		conn, err := grpc.NewClient("dns:///localhost:"+strings.TrimPrefix(l.Addr().String(), "127.0.0.1:"), grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	first := open()
	if err := check(first); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		what   string
		change func()
		want   bool
	}{
		{"the server's key is not there yet", func() { put("server.crt", "new-server.crt") }, true},
		{"as before", func() {}, true},
		{"nor readable", func() { put("server.key", "old-ca.crt") }, true},
		{"the server has a certificate of an authority that the client does not know", func() { put("server.key", "new-server.key") }, false},
		{"the client trusts it", func() { put("client-ca.crt", "new-ca.crt") }, true},
		{"the server trusts only the new authority", func() { put("server-ca.crt", "new-ca.crt") }, false},
		{"the client has a certificate of it", func() { replace("client", "new") }, true},
	} {
		step.change()
		if err := check(open()); (err == nil) != step.want {
			t.Errorf("%s: %v, want success %v", step.what, err, step.want)
		}
	}
	if err := check(first); err != nil {
		t.Errorf("the first connection: %v", err)
	}
	for text, want := range map[string]int{"private key does not match": 1, "found a certificate rather than a key": 1, "have changed and cannot be used": 2, "have changed\" certificate=": 2} {
		if n := strings.Count(log.String(), text); n != want {
			t.Errorf("the log has %q %d times, want %d:\n%s", text, n, want, log.String())
		}
	}
}
