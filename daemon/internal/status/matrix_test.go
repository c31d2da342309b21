package status

import (
	"context"
	"crypto/tls"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/grpcserve"
)

// rawCodec sends and receives messages as bytes. No bytes are a valid message of every type.
type rawCodec struct{}

func (rawCodec) Name() string                     { return "proto" }
func (rawCodec) Marshal(any) ([]byte, error)      { return nil, nil }
func (rawCodec) Unmarshal(_ []byte, to any) error { return nil }

// call calls any method with an empty request, and returns the error of the first response.
func call(ctx context.Context, conn *grpc.ClientConn, method string, streams bool) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if !streams {
		return conn.Invoke(ctx, method, nil, nil, grpc.ForceCodec(rawCodec{}))
	}
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method, grpc.ForceCodec(rawCodec{}))
	if err != nil {
		return err
	}
	// The server may have ended the stream before it reads; RecvMsg returns the reason.
	_ = stream.SendMsg(nil)
	_ = stream.CloseSend()
	return stream.RecvMsg(nil)
}

// matrixClient is a client of the matrices of roles.
type matrixClient struct {
	name    string
	conn    *grpc.ClientConn
	operate bool
	// remedy is part of the error of a refused call, who matches the caller in events.
	remedy, who string
}

// matrixClients starts a server with every kind of endpoint and returns its clients. change may change the service.
func matrixClients(t *testing.T, change func(*ServiceConfig)) (*served, []matrixClient) {
	t.Helper()
	l := newFake(1, 10)
	l.start(t)
	s := l.service(t, change)
	// A watch of events answers only when an event occurs.
	go func() {
		for l.do(t.Context(), func() { l.builder.Event(Event{Kind: EventFault}); l.builder.journal.publish() }) == nil {
			time.Sleep(time.Millisecond)
		}
	}()
	ca := newAuthority(t)
	secure := &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{ca.issue(t)}, ClientCAs: ca.pool, ClientAuth: tls.RequireAndVerifyClientCert}
	readOnly := filepath.Join(t.TempDir(), "ro")
	srv := serve(t, s, func(c *ServerConfig) {
		c.ReadOnlySocket, c.Listen, c.TLS = readOnly, "127.0.0.1:0", secure
		c.Operators = []string{"alice", "node7.example", "*.ops.example"}
	})
	plainTCP := serve(t, s, func(c *ServerConfig) { c.Listen = "127.0.0.1:0" })
	noList := serve(t, s, func(c *ServerConfig) { c.Listen, c.TLS = "127.0.0.1:0", secure })
	any := serve(t, s, func(c *ServerConfig) { c.Listen, c.TLS, c.Operators = "127.0.0.1:0", secure, []string{"*"} })

	local := grpc.WithTransportCredentials(insecure.NewCredentials())
	with := func(to *served, common string, dns ...string) *grpc.ClientConn {
		return dial(t, to.address(), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			RootCAs: ca.pool, Certificates: []tls.Certificate{ca.issueTo(t, common, dns...)},
		})))
	}
	return srv, []matrixClient{
		{"socket", srv.conn, true, "", `uid \d+( \(\S+\))? pid \d+`},
		{"read-only socket", dial(t, "unix:"+readOnly, local), false, "use " + srv.socket, `uid \d+( \(\S+\))? pid \d+`},
		{"TCP without TLS", dial(t, plainTCP.address(), local), false, "use " + plainTCP.socket, `127\.0\.0\.1:\d+`},
		{"TLS, listed DNS name", with(srv, "x", "other.example", "node7.example"), true, "", `"other\.example" at 127\.0\.0\.1:\d+`},
		{"TLS, DNS name below a listed suffix", with(srv, "x", "eve.ops.example"), true, "", `"eve\.ops\.example" at 127\.0\.0\.1:\d+`},
		{"TLS, listed common name", with(srv, "alice"), true, "", `"alice" at 127\.0\.0\.1:\d+`},
		{"TLS, listed common name next to a DNS name", with(srv, "alice", "node9.example"), false, `certificate of ["node9.example"], which may only read: list the name in api.tls.operators`, `"node9\.example" at 127\.0\.0\.1:\d+`},
		{"TLS, other DNS name", with(srv, "x", "node8.example"), false, `certificate of ["node8.example"], which may only read: list the name in api.tls.operators, or use ` + srv.socket, `"node8\.example" at 127\.0\.0\.1:\d+`},
		{"TLS, no name", with(srv, ""), false, "list the name in api.tls.operators", `"" at 127\.0\.0\.1:\d+`},
		{"TLS without a list", with(noList, "alice", "node7.example"), false, "list the name in api.tls.operators", `"node7\.example" at 127\.0\.0\.1:\d+`},
		{"TLS, every certificate", with(any, "bob"), true, "", `"bob" at 127\.0\.0\.1:\d+`},
	}
}

// TestMatrixOfRoles calls every method of every service as every kind of client: exactly those that change the daemon
// are refused, exactly to clients that may only read, before their handler runs, and with the remedy.
func TestMatrixOfRoles(t *testing.T) {
	handled := make(chan string, 100) // the callers
	srv, clients := matrixClients(t, func(c *ServiceConfig) {
		c.Drain = func(ctx context.Context, r DrainRequest) (DrainTarget, []string, error) {
			handled <- grpcserve.CallerOf(ctx).String()
			return r.Target, nil, nil
		}
		c.ClearSession = func(ctx context.Context, _ string) error {
			handled <- grpcserve.CallerOf(ctx).String()
			return nil
		}
		c.Reload = func(ctx context.Context, _ bool) ([]string, error) {
			handled <- grpcserve.CallerOf(ctx).String()
			return nil, nil
		}
		c.Proofs = fakeProofs{}
	})
	operating := map[string]bool{
		"/fare.v1.FabricService/Drain": true, "/fare.v1.FabricService/Undrain": true, "/fare.v1.FabricService/Reload": true,
		"/fare.v1.FabricService/ClearSession": true, "/fare.v1.FabricService/Ping": true,
	}
	tested := 0
	for name, service := range srv.server.endpoints[0].grpc.GetServiceInfo() {
		for _, m := range service.Methods {
			method := "/" + name + "/" + m.Name
			for _, c := range clients {
				err := call(t.Context(), c.conn, method, m.IsClientStream || m.IsServerStream)
				code := grpcstatus.Code(err)
				want := operating[method] && !c.operate
				if code == codes.Unavailable || code == codes.Unimplemented || code == codes.DeadlineExceeded {
					t.Errorf("%s over %s: %v, so nothing is tested", method, c.name, err)
				}
				if (code == codes.PermissionDenied) != want {
					t.Errorf("%s over %s: %v, want refused %v", method, c.name, err, want)
				}
				if want && !strings.Contains(err.Error(), c.remedy) {
					t.Errorf("%s over %s: %q lacks %q", method, c.name, err, c.remedy)
				}
				tested++
			}
		}
	}
	if want := len(methods) * len(clients); tested != want {
		t.Errorf("%d combinations, want %d", tested, want)
	}
	// The empty reload is valid and reached its handler, once for each operator; the empty drains and the session
	// without a name are invalid, as is the ping without a destination.
	operators := 0
	for _, c := range clients {
		if c.operate {
			operators++
		}
	}
	if len(handled) != operators {
		t.Errorf("%d handlers ran, want %d", len(handled), operators)
	}
	for len(handled) > 0 {
		<-handled
	}
	// Valid calls reach their handlers from operators alone, with the caller.
	for _, c := range clients {
		fabric, p0 := farev1.NewFabricServiceClient(c.conn), &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: "p0"}}
		_, drain := fabric.Drain(t.Context(), &farev1.DrainRequest{Target: p0, Force: true})
		_, undrain := fabric.Undrain(t.Context(), &farev1.UndrainRequest{Target: p0})
		_, clear := fabric.ClearSession(t.Context(), &farev1.ClearSessionRequest{Session: "p0/p0a"})
		_, reload := fabric.Reload(t.Context(), &farev1.ReloadRequest{})
		for i, err := range []error{drain, undrain, clear, reload} {
			if (err == nil) != c.operate {
				t.Errorf("call %d over %s: %v, want success %v", i, c.name, err, c.operate)
			}
		}
		if want := 4; c.operate && len(handled) != want || !c.operate && len(handled) != 0 {
			t.Fatalf("%d handlers ran over %s", len(handled), c.name)
		}
		for len(handled) > 0 {
			if caller := <-handled; !regexp.MustCompile("^" + c.who + "$").MatchString(caller) {
				t.Errorf("over %s the caller is %s, want %s", c.name, caller, c.who)
			}
		}
	}
}
