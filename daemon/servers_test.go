package daemon

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"fmt"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/internal/tlsfiles"
)

// serving runs the servers of a daemon without its loop until the test ends, and returns their number.
func serving(t *testing.T, l *loop) int {
	t.Helper()
	answering(t, l)
	tasks, err := l.d.servers()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	for _, task := range tasks {
		go func() { ended <- task(ctx) }()
	}
	t.Cleanup(func() {
		cancel()
		for range tasks {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	})
	return len(tasks)
}

// TestSocketsOfADaemon checks that a daemon opens the configured sockets and no others, and serves no metrics without
// an address.
func TestSocketsOfADaemon(t *testing.T) {
	for what, c := range map[string]struct {
		readOnly, metrics, slots string
		want                     string
		servers                  int
	}{
		"none":       {"none", "", "none", "a.sock", 1},
		"read only":  {"b.sock", "", "none", "a.sock b.sock", 1},
		"metrics":    {"none", "127.0.0.1:0", "none", "a.sock", 2},
		"slot table": {"none", "", "slots", "a.sock", 2},
	} {
		t.Run(what, func(t *testing.T) {
			t.Chdir(testbed.ShortDir(t))
			l := idle(t, shape{Planes: 1, SubPorts: 1}.Text())
			l.d.cfg.API.Socket, l.d.cfg.API.ReadOnlySocket, l.d.cfg.Metrics.Listen = "a.sock", c.readOnly, c.metrics
			l.d.cfg.SlotTable.File = c.slots
			if got := serving(t, l); got != c.servers {
				t.Errorf("%d servers, want %d", got, c.servers)
			}
			entries, err := os.ReadDir(".")
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, e := range entries {
				if e.Type() == os.ModeSocket {
					got = append(got, e.Name())
				}
			}
			if strings.Join(got, " ") != c.want {
				t.Errorf("sockets %q, want %q", got, c.want)
			}
		})
	}
}

// certificate writes a self-signed certificate for localhost and its key, and returns their paths.
func certificate(t *testing.T) (cert, key string) {
	t.Helper()
	secret, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, DNSNames: []string{"localhost"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &secret.PublicKey, secret)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(secret)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "crt"), filepath.Join(dir, "key")
	for name, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// TestAPIWithTLS checks that the API over TCP uses the configured certificates.
func TestAPIWithTLS(t *testing.T) {
	cert, key := certificate(t)
	l := idle(t, shape{Planes: 1, SubPorts: 1}.Text())
	address := fmt.Sprintf("127.0.0.1:%d", netnstest.FreePort(t))
	api := &l.d.cfg.API
	api.Socket, api.ReadOnlySocket, api.Listen = filepath.Join(testbed.ShortDir(t), "s"), config.NoSocket, address
	api.TLS = &config.ServerTLS{CertFile: cert, KeyFile: key, ClientCAFile: cert}
	l.d.cfg.SlotTable.File = config.NoSlotTable
	serving(t, l)
	secure, err := tlsfiles.Client(cert, key, cert)
	if err != nil {
		t.Fatal(err)
	}
	secure.ServerName = "localhost"
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(credentials.NewTLS(secure)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := farev1.NewFabricServiceClient(conn).GetStatus(t.Context(), &farev1.GetStatusRequest{}); err != nil {
		t.Error(err)
	}
}

// TestMetricsThatEndAreAnError checks that a failed listener is an error, and that the end of the daemon is not.
func TestMetricsThatEndAreAnError(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := serveMetrics(t.Context(), l, http.NotFoundHandler()); err == nil || !errors.Is(err, net.ErrClosed) || !strings.HasPrefix(err.Error(), "metrics: ") {
		t.Errorf("a closed listener: %v", err)
	}
	if l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := serveMetrics(ctx, l, http.NotFoundHandler()); err != nil {
		t.Errorf("the end: %v", err)
	}
}

// TestBrokenGoBGPEndsTheProcess checks that a fatal report of GoBGP ends the process with an error.
func TestBrokenGoBGPEndsTheProcess(t *testing.T) {
	l := idle(t, shape{Planes: 1, SubPorts: 1}.Text())
	code := 0
	exit = func(c int) { code = c }
	defer func() { exit = os.Exit }()
	if l.d.fatal(errors.New("a table is broken")); code != 1 {
		t.Errorf("the exit code is %d", code)
	}
}

// TestInstances checks that a run is named by its start unless it is given a name.
func TestInstances(t *testing.T) {
	before := time.Now().Add(-time.Second)
	d := idle(t, shape{Planes: 1, SubPorts: 1}.Text()).d
	began, err := time.Parse("20060102T150405.000000000Z", d.deps.Instance)
	if err != nil || began.Before(before) || began.After(time.Now()) {
		t.Errorf("instance %q, %v", d.deps.Instance, err)
	}
	named, err := New(coretest.Parse(t, shape{Planes: 1, SubPorts: 1}.Text()), Deps{Memory: dialMemory, Links: newTestLinks(1, 400e9), Embedded: true, Instance: "seven"})
	if err != nil {
		t.Fatal(err)
	}
	defer named.Close()
	if named.deps.Instance != "seven" {
		t.Errorf("instance %q", named.deps.Instance)
	}
}
