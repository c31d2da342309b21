package agent

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/internal/tlsfiles"
)

// rawCodec sends and receives messages as bytes. No bytes are a valid message of every type.
type rawCodec struct{}

func (rawCodec) Name() string                { return "proto" }
func (rawCodec) Marshal(any) ([]byte, error) { return nil, nil }
func (rawCodec) Unmarshal([]byte, any) error { return nil }

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
	name     string
	conn     *grpc.ClientConn
	programs bool
	// who is part of the caller's name in the log, remedy part of the error of a refused call.
	who, remedy string
}

// matrixClients starts agents with every kind of endpoint and returns their clients.
func matrixClients(t *testing.T, c Config) (*Agent, []matrixClient) {
	t.Helper()
	dir := t.TempDir()
	ca := newAuthority(t, dir, "ca")
	cert, key := ca.issue(t, dir, "agent")
	secure, err := tlsfiles.Server(cert, key, ca.file, nil)
	if err != nil {
		t.Fatal(err)
	}
	with := func(a *Agent, common string, dns ...string) *grpc.ClientConn {
		cert, key := ca.issue(t, dir, common, dns...)
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		pool := x509.NewCertPool()
		pool.AddCert(ca.cert)
		return connect(t, a.Addr().String(), credentials.NewTLS(&tls.Config{RootCAs: pool, ServerName: "127.0.0.1", Certificates: []tls.Certificate{pair}}))
	}
	c.Socket, c.Listen = filepath.Join(dir, "s"), "127.0.0.1:0"
	bare, _ := run(t, c, &recorder{})
	local, tcp := plain(t, c.Socket), connect(t, bare.Addr().String(), insecure.NewCredentials())
	c.Socket, c.TLS = filepath.Join(dir, "t"), secure
	unlisted, _ := run(t, c, &recorder{})
	c.Socket, c.TLSClients = filepath.Join(dir, "u"), []string{"fared", "node7.example", "*.fared.example"}
	listed, _ := run(t, c, &recorder{})
	return bare, []matrixClient{
		{"socket", local, true, "uid ", ""},
		{"TCP without TLS", tcp, false, "127.0.0.1:", "use the agent's socket, or TLS and --tls-client"},
		{"TLS without a list", with(unlisted, "fared"), false, `\"fared\" at 127.0.0.1:`, `certificate of ["fared"], which may only read: name it with --tls-client`},
		{"TLS, listed common name", with(listed, "fared"), true, `\"fared\" at 127.0.0.1:`, ""},
		{"TLS, listed DNS name", with(listed, "x", "node7.example"), true, `\"node7.example\" at 127.0.0.1:`, ""},
		{"TLS, DNS name below a listed suffix", with(listed, "x", "a.fared.example"), true, `\"a.fared.example\" at 127.0.0.1:`, ""},
		{"TLS, other name", with(listed, "fared2"), false, `\"fared2\" at 127.0.0.1:`, "name it with --tls-client"},
		{"TLS, listed common name next to a DNS name", with(listed, "fared", "node8.example"), false, `\"node8.example\" at 127.0.0.1:`, "name it with --tls-client"},
	}
}

// TestMatrixOfRoles calls every method of every service as every kind of client: Hello, Program, Attach and Detach are
// refused to clients that may only read, with the remedy; no other call is refused.
func TestMatrixOfRoles(t *testing.T) {
	a, clients := matrixClients(t, Config{})
	programming := map[string]bool{"/fare.v1.DataplaneService/Hello": true, "/fare.v1.DataplaneService/Program": true, "/fare.v1.AttachService/Attach": true, "/fare.v1.AttachService/Detach": true}
	byName := regexp.MustCompile(`/(Snapshot|Landing|Counters|ListAttachments|Check|List|Watch|ServerReflectionInfo)$`)
	methods := 0
	for name, service := range a.endpoints[0].grpc.GetServiceInfo() {
		for _, m := range service.Methods {
			methods++
			method := "/" + name + "/" + m.Name
			if reads[method] == programming[method] || reads[method] != byName.MatchString(method) {
				t.Errorf("%s: reading suffices: %v", method, reads[method])
			}
			for _, c := range clients {
				err := call(t.Context(), c.conn, method, m.IsClientStream || m.IsServerStream)
				if code := status.Code(err); code == codes.Unavailable || code == codes.DeadlineExceeded {
					t.Errorf("%s over %s: %v, so nothing is tested", method, c.name, err)
				}
				want := programming[method] && !c.programs
				if (status.Code(err) == codes.PermissionDenied) != want {
					t.Errorf("%s over %s: %v, want refused %v", method, c.name, err, want)
				}
				if want && !strings.Contains(err.Error(), c.remedy) {
					t.Errorf("%s over %s: %q lacks %q", method, c.name, err, c.remedy)
				}
			}
		}
	}
	if want := len(reads) + len(programming); methods != want {
		t.Errorf("%d methods are served, %d are classified", methods, want)
	}
	// The state of a client that may program.
	for _, c := range clients {
		if c.programs {
			if refused := program(t, c.conn, typicalState()...); len(refused) > 0 {
				t.Errorf("%s: %v", c.name, refused)
			}
		}
	}
}

// TestCallsAreLogged checks that each Hello and each Program is one line of the log over every transport, with the
// caller and the result, whether it is allowed or not; and that calls that only read are none.
func TestCallsAreLogged(t *testing.T) {
	var log logged
	_, clients := matrixClients(t, Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	for _, c := range clients {
		for _, method := range []string{"Hello", "Program", "Snapshot"} {
			before := len(log.String())
			_ = call(t.Context(), c.conn, "/fare.v1.DataplaneService/"+method, method != "Hello")
			var lines []string
			for line := range strings.Lines(log.String()[before:]) {
				if strings.Contains(line, "msg=call ") {
					lines = append(lines, line)
				}
			}
			if method == "Snapshot" {
				if len(lines) > 0 {
					t.Errorf("Snapshot over %s: log %q", c.name, lines)
				}
				continue
			}
			result := "PermissionDenied"
			if c.programs && method == "Hello" {
				result = "InvalidArgument" // it is empty
			} else if c.programs {
				result = "OK"
			}
			if len(lines) != 1 || !strings.Contains(lines[0], "method="+method+" ") || !strings.Contains(lines[0], c.who) || !strings.Contains(lines[0], "result="+result) {
				t.Errorf("%s over %s: log %q, want one line with %s and %s", method, c.name, lines, c.who, result)
			}
		}
	}
	before := len(log.String())
	for range 100 {
		_ = call(t.Context(), clients[1].conn, "/fare.v1.DataplaneService/Hello", false)
	}
	if n := strings.Count(log.String()[before:], "msg=call "); n > 10 {
		t.Errorf("100 refused calls are %d lines, want at most 10", n)
	}
}

// TestTLSClientsAreChecked checks that invalid and useless lists of names are errors of their field.
func TestTLSClientsAreChecked(t *testing.T) {
	for name, c := range map[string]Config{
		`TLSClients: "*x" is not a name of a certificate`: {Driver: Memory, TLS: &tls.Config{}, TLSClients: []string{"*x"}},
		"TLSClients: there is no TLS":                     {Driver: Memory, TLSClients: []string{"fared"}},
	} {
		if err := c.complete(); err == nil || !strings.HasPrefix(err.Error(), name) {
			t.Errorf("%v, want %s", err, name)
		}
	}
}
