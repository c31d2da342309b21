package status

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	grpcstatus "google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/unixsocket"
)

func TestServerHealthAndReflection(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	srv := serve(t, l.service(t, nil), nil)
	for _, name := range []string{"", "fare.v1.WeightService", "fare.v1.FabricService", "liveness"} {
		got, err := healthpb.NewHealthClient(srv.conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
		if err != nil || got.Status != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("health of %q: %v, %v", name, got, err)
		}
	}
	stream, err := reflectionpb.NewServerReflectionClient(srv.conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	got, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range got.GetListServicesResponse().GetService() {
		names = append(names, s.Name)
	}
	for _, want := range []string{"fare.v1.FabricService", "fare.v1.WeightService", "grpc.health.v1.Health"} {
		if !slices.Contains(names, want) {
			t.Errorf("reflection lists %s, without %s", names, want)
		}
	}
	stream.CloseSend()
	if _, err := stream.Recv(); err == nil {
		t.Error("the reflection stream goes on after its end")
	}
}

func TestSocketModeOwnerAndRemoval(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	srv := serve(t, l.service(t, nil), func(c *ServerConfig) {
		c.SocketMode = 0o600
		c.SocketOwner = ":" + itoa(os.Getgid())
	})
	info, err := os.Lstat(srv.socket)
	if err != nil || info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("socket: %v, %v, want mode 0600", info.Mode(), err)
	}
	if err := srv.stop(); err != nil {
		t.Errorf("Serve: %v", err)
	}
	if _, err := os.Lstat(srv.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(srv.socket), ".fared-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %s, %v", left, err)
	}
}

func itoa(n int) string { return big.NewInt(int64(n)).String() }

func TestSocketSecondInstance(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	srv := serve(t, l.service(t, nil), nil)
	_, err := NewServer(ServerConfig{Socket: srv.socket}, l.service(t, nil), nil)
	var inUse *unixsocket.InUseError
	if !errors.As(err, &inUse) || inUse.Path != srv.socket || !strings.Contains(err.Error(), "api.socket") {
		t.Errorf("second instance: %v, want InUseError", err)
	}
	if _, err := srv.weights.ListWeights(t.Context(), &farev1.ListWeightsRequest{}); err != nil {
		t.Errorf("the first instance after the second tried: %v", err)
	}
}

func TestSocketInTheWay(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	t.Run("stale", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s")
		old, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		old.SetUnlinkOnClose(false)
		old.Close()
		srv := serve(t, l.service(t, nil), func(c *ServerConfig) { c.Socket = path })
		if _, err := srv.weights.ListWeights(t.Context(), &farev1.ListWeightsRequest{}); err != nil {
			t.Error(err)
		}
	})
	t.Run("served by a stranger without our lock", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s")
		other, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		_, err = NewServer(ServerConfig{Socket: path}, l.service(t, nil), nil)
		if inUse := (*unixsocket.InUseError)(nil); !errors.As(err, &inUse) {
			t.Errorf("%v, want InUseError", err)
		}
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("the stranger's socket: %v", err)
		}
	})
	t.Run("file", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s")
		if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := NewServer(ServerConfig{Socket: path}, l.service(t, nil), nil)
		if err == nil || !strings.Contains(err.Error(), "is not a socket") {
			t.Errorf("error %v", err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != "precious" {
			t.Errorf("the file is now %q, %v", b, err)
		}
	})
}

func TestServerRefusesConfig(t *testing.T) {
	l := newFake(1, 10)
	for _, c := range []struct {
		name, want string
		config     ServerConfig
	}{
		{"nothing", "api.socket or api.listen", ServerConfig{}},
		{"no directory", "make the directory of", ServerConfig{Socket: "/proc/none/s"}},
		{"long path", "too long", ServerConfig{Socket: filepath.Join(t.TempDir(), strings.Repeat("s", 100))}},
		{"no such group", "existing group", ServerConfig{Socket: filepath.Join(t.TempDir(), "s"), SocketOwner: ":no-such-group"}},
		{"public without TLS", "set api.tls", ServerConfig{Listen: "0.0.0.0:0"}},
		{"TLS without client certificates", "client_ca_file", ServerConfig{Listen: "127.0.0.1:0", TLS: &tls.Config{}}},
	} {
		s, err := NewServer(c.config, l.service(t, nil), nil)
		if err == nil {
			s.Close()
			t.Errorf("%s: no error", c.name)
		} else if !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %q lacks %q", c.name, err, c.want)
		}
	}
	// A failure after the lock, or a server that never served, leaves the path free.
	path := filepath.Join(t.TempDir(), "s")
	for range 2 {
		if _, err := NewServer(ServerConfig{Socket: path, Listen: "0.0.0.0:0"}, l.service(t, nil), nil); err == nil {
			t.Fatal("no error")
		}
	}
	s, err := NewServer(ServerConfig{Socket: path}, l.service(t, nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// authority signs certificates for a test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{pool: x509.NewCertPool()}
	a.cert, a.key = a.make(t, nil, "fared test")
	a.pool.AddCert(a.cert)
	return a
}

func (a *authority) make(t *testing.T, by *authority, common string, dns ...string) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: common}, DNSNames: dns, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), BasicConstraintsValid: true, IsCA: by == nil,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	parent, signer := template, key
	if by != nil {
		parent, signer = by.cert, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

func (a *authority) issue(t *testing.T) tls.Certificate {
	t.Helper()
	return a.issueTo(t, "fared test")
}

// issueTo issues a certificate with a common name and DNS names.
func (a *authority) issueTo(t *testing.T, common string, dns ...string) tls.Certificate {
	t.Helper()
	cert, key := a.make(t, a, common, dns...)
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}
}

func TestServerMutualTLS(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	ca, stranger := newAuthority(t), newAuthority(t)
	srv := serve(t, l.service(t, nil), func(c *ServerConfig) {
		c.Listen = "127.0.0.1:0"
		c.TLS = &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{ca.issue(t)}, ClientCAs: ca.pool, ClientAuth: tls.RequireAndVerifyClientCert}
	})
	for _, c := range []struct {
		name string
		tls  *tls.Config
		ok   bool
	}{
		{"with a certificate", &tls.Config{RootCAs: ca.pool, Certificates: []tls.Certificate{ca.issue(t)}}, true},
		{"without a certificate", &tls.Config{RootCAs: ca.pool}, false},
		{"with a stranger's certificate", &tls.Config{RootCAs: ca.pool, Certificates: []tls.Certificate{stranger.issue(t)}}, false},
		{"that trusts another authority", &tls.Config{RootCAs: stranger.pool, Certificates: []tls.Certificate{ca.issue(t)}}, false},
	} {
		conn := dial(t, srv.address(), grpc.WithTransportCredentials(credentials.NewTLS(c.tls)))
		_, err := farev1.NewWeightServiceClient(conn).ListWeights(t.Context(), &farev1.ListWeightsRequest{})
		if c.ok && err != nil || !c.ok && grpcstatus.Code(err) != codes.Unavailable {
			t.Errorf("a client %s: %v", c.name, err)
		}
	}
	if _, err := srv.weights.ListWeights(t.Context(), &farev1.ListWeightsRequest{}); err != nil {
		t.Errorf("the socket beside TLS: %v", err)
	}
}

func TestServerPanic(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	s := l.service(t, func(c *ServiceConfig) {
		c.Reload = func(context.Context, bool) ([]string, error) { panic("a bug") }
	})
	srv := serve(t, s, nil)
	_, err := srv.fabric.Reload(t.Context(), &farev1.ReloadRequest{})
	if grpcstatus.Code(err) != codes.Internal || strings.Contains(err.Error(), "a bug") || !strings.Contains(err.Error(), "/fare.v1.FabricService/Reload") {
		t.Errorf("a handler that panics: %v", err)
	}
	if _, err := srv.fabric.GetStatus(t.Context(), &farev1.GetStatusRequest{}); err != nil {
		t.Errorf("the next call: %v", err)
	}
	if n := s.panics.Load(); n != 1 {
		t.Errorf("%d panics counted, want 1", n)
	}
}

func TestServerWatchLimit(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	s := l.service(t, func(c *ServiceConfig) { c.MaxWatches = 4 }) // half of them for one client
	srv := serve(t, s, nil)
	ctx, cancel := context.WithCancel(t.Context())
	first, err := srv.weights.WatchWeights(ctx, &farev1.WatchWeightsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := first.Recv(); err != nil {
		t.Fatal(err)
	}
	if _, err := srv.fabric.WatchEvents(t.Context(), &farev1.WatchEventsRequest{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "two watches", func() bool { return s.watching() == 2 })
	refused := func() error {
		third, err := srv.weights.WatchWeights(t.Context(), &farev1.WatchWeightsRequest{})
		if err == nil {
			_, err = third.Recv()
		}
		return err
	}
	err = refused()
	quota := false
	for _, d := range grpcstatus.Convert(err).Details() {
		_, ok := d.(*errdetails.QuotaFailure)
		quota = quota || ok
	}
	if grpcstatus.Code(err) != codes.ResourceExhausted || !quota || !strings.Contains(err.Error(), "end one") {
		t.Errorf("the third watch: %v", err)
	}
	cancel()
	eventually(t, "the first watch's end", func() bool { return s.watching() == 1 })
	if err := refused(); err != nil {
		t.Errorf("a watch after one ended: %v", err)
	}
}

// TestServerStop checks that a stop asks watchers to reconnect.
func TestServerStop(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	srv := serve(t, l.service(t, nil), func(c *ServerConfig) { c.StopTimeout = time.Hour })
	stream, err := srv.weights.WatchWeights(t.Context(), &farev1.WatchWeightsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := srv.stop(); err != nil {
		t.Errorf("Serve: %v", err)
	}
	if _, err := stream.Recv(); grpcstatus.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "watch again") {
		t.Errorf("the watch ended with %v, want UNAVAILABLE", err)
	}
}

// TestServerStopIsNotDelayed checks that a stop does not wait for a call that never ends.
func TestServerStopIsNotDelayed(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	entered, release := make(chan struct{}), make(chan struct{})
	s := l.service(t, func(c *ServiceConfig) {
		c.Reload = func(ctx context.Context, _ bool) ([]string, error) {
			close(entered)
			<-ctx.Done()
			<-release
			return nil, ctx.Err()
		}
	})
	srv := serve(t, s, func(c *ServerConfig) { c.StopTimeout = time.Millisecond })
	result := make(chan error, 1)
	go func() {
		_, err := srv.fabric.Reload(t.Context(), &farev1.ReloadRequest{})
		close(release)
		result <- err
	}()
	<-entered
	if err := srv.stop(); err != nil {
		t.Errorf("Serve: %v", err)
	}
	if err := <-result; grpcstatus.Code(err) != codes.Unavailable {
		t.Errorf("the endless call ended with %v, want UNAVAILABLE", err)
	}
}

// TestLoopGone checks the errors for a loop that has stopped, or does not answer.
func TestLoopGone(t *testing.T) {
	l := newFake(1, 10)
	l.step(5)
	close(l.stopped)
	s := l.service(t, nil)
	_, err := s.Weights().ListWeights(t.Context(), &farev1.ListWeightsRequest{})
	if grpcstatus.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "retry") {
		t.Errorf("a stopped loop: %v", err)
	}
	busy := newFake(1, 10)
	busy.step(5)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err = busy.service(t, nil).Weights().GetWeights(ctx, &farev1.GetWeightsRequest{Destination: "10.0.0.1"})
	if grpcstatus.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "did not answer in time") {
		t.Errorf("a busy loop: %v", err)
	}
}

func TestNewServiceNeedsItsFunctions(t *testing.T) {
	r := newFake(1, 10).builder.Reader(here)
	explain := func(Key) (Explanation, bool) { return Explanation{}, false }
	for i, c := range []ServiceConfig{{}, {Reader: r}, {Reader: r, Explain: explain}} {
		if _, err := NewService(c); err == nil {
			t.Errorf("configuration %d: no error", i)
		}
	}
}
