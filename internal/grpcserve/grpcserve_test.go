package grpcserve

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// TestListenNeedsCertificates checks that an address that other hosts reach is refused without TLS, and that TLS is
// refused unless every client needs a certificate.
func TestListenNeedsCertificates(t *testing.T) {
	for _, address := range []string{"0.0.0.0:0", "[::]:0", ":0"} {
		if l, _, err := Listen(address, nil); !errors.Is(err, ErrReachable) || l != nil {
			t.Errorf("%s without TLS: %v, want ErrReachable", address, err)
		}
	}
	strict := tls.Config{MinVersion: tls.VersionTLS13, ClientCAs: x509.NewCertPool(), ClientAuth: tls.RequireAndVerifyClientCert}
	for name, weaken := range map[string]func(*tls.Config){
		"no authority":         func(c *tls.Config) { c.ClientCAs = nil },
		"optional certificate": func(c *tls.Config) { c.ClientAuth = tls.VerifyClientCertIfGiven },
		"unverified":           func(c *tls.Config) { c.ClientAuth = tls.RequireAnyClientCert },
		"TLS 1.2":              func(c *tls.Config) { c.MinVersion = tls.VersionTLS12 },
	} {
		weak := strict.Clone()
		weaken(weak)
		if l, _, err := Listen("127.0.0.1:0", weak); err == nil {
			l.Close()
			t.Errorf("%s is accepted", name)
		}
	}
	for address, secure := range map[string]*tls.Config{"127.0.0.1:0": nil, "localhost:0": nil, "0.0.0.0:0": &strict} {
		l, options, err := Listen(address, secure)
		if err != nil || (len(options) > 0) != (secure != nil) {
			t.Fatalf("%s: %d options, %v", address, len(options), err)
		}
		l.Close()
	}
}

// TestStop checks that Stop lets idle servers end by themselves, and cancels a call that does not end.
func TestStop(t *testing.T) {
	checks := health.NewServer()
	for _, watching := range []bool{false, true} {
		l, options, err := Listen("127.0.0.1:0", nil)
		if err != nil {
			t.Fatal(err)
		}
		s := New(1<<10, Window, checks, options...)
		served := make(chan error, 1)
		go func() { served <- s.Serve(l) }()
		conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{}, grpc.WaitForReady(true)); err != nil {
			t.Fatal(err)
		}
		timeout := time.Minute
		if watching {
			timeout = 10 * time.Millisecond
			stream, err := healthpb.NewHealthClient(conn).Watch(context.Background(), &healthpb.HealthCheckRequest{})
			if err == nil {
				_, err = stream.Recv()
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if graceful := Stop(timeout, s); graceful == watching {
			t.Errorf("an open call: %v, graceful: %v", watching, graceful)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}
