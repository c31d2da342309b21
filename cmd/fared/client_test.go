package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
)

// TestHungDaemon checks that a daemon that accepts connections and never answers does not block a command forever.
func TestHungDaemon(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var out, errOut bytes.Buffer
	e := &cli.Env{Out: &out, Err: &errOut, Socket: socket, Patience: 50 * time.Millisecond}
	root := newRoot(e)
	root.SetArgs([]string{"--socket", socket, "status"})
	var coded *cli.Error
	if err := root.ExecuteContext(t.Context()); !errors.As(err, &coded) || coded.Code != cli.ExitUnreachable || coded.Remedy == "" {
		t.Errorf("a daemon that hangs: %v", err)
	}
	if out.Len() > 0 {
		t.Errorf("standard output: %s", out.String())
	}
}

// TestExplain checks that every kind of error has its exit code and a remedy.
func TestExplain(t *testing.T) {
	e := &cli.Env{Socket: "/run/s", Patience: time.Second}
	for _, test := range []struct {
		code codes.Code
		text string
		exit int
		want string
	}{
		{codes.Unavailable, `connection error: desc = "transport: Error while dialing: dial unix /run/s: connect: connection refused"`, cli.ExitUnreachable, "no daemon answers at /run/s: connection refused"},
		{codes.Unavailable, `connection error: desc = "transport: Error while dialing: dial unix /run/s: connect: permission denied"`, cli.ExitUnreachable, "no daemon answers at /run/s: permission denied"},
		{codes.Unavailable, "the daemon is stopping", cli.ExitUnreachable, "no daemon answers at /run/s: the daemon is stopping"},
		{codes.DeadlineExceeded, "context deadline exceeded", cli.ExitUnreachable, "the daemon at /run/s does not answer within 1s"},
		{codes.NotFound, "no route", cli.ExitNotFound, "no route"},
		{codes.InvalidArgument, "wrong", cli.ExitUsage, "wrong"},
		{codes.FailedPrecondition, "refused", cli.ExitFailed, "refused"},
		{codes.PermissionDenied, "Drain is not possible here", cli.ExitFailed, "Drain is not possible here"},
		{codes.Unimplemented, "unknown method", cli.ExitFailed, "unknown method"},
		{codes.Canceled, "context canceled", cli.ExitFailed, "interrupted"},
		{codes.Internal, "broken", cli.ExitFailed, "broken (Internal)"},
	} {
		var coded *cli.Error
		if err := e.Explain(status.Error(test.code, test.text), "look there"); !errors.As(err, &coded) {
			t.Errorf("%s: %v", test.code, err)
		} else if coded.Code != test.exit || coded.Error() != test.want || coded.Remedy == "" {
			t.Errorf("%s: exit %d, %q, remedy %q; want exit %d, %q", test.code, coded.Code, coded, coded.Remedy, test.exit, test.want)
		}
	}
	if err := e.Explain(nil, ""); err != nil {
		t.Error(err)
	}
}

// TestTLS checks that over TCP the command line sends its certificate, and names an invalid file.
func TestTLS(t *testing.T) {
	cert, secret := clitest.Certificate(t)
	pair, err := tls.LoadX509KeyPair(cert, secret)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(pair.Leaf)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert})))
	farev1.RegisterFabricServiceServer(s, &fake{})
	var serving sync.WaitGroup
	serving.Go(func() { s.Serve(l) })
	t.Cleanup(func() { s.Stop(); serving.Wait() })
	address := l.Addr().String()

	refused(t, cli.ExitUnreachable, "--socket", address, "status") // without TLS
	t.Setenv("FARED_TLS_CERT", cert)
	t.Setenv("FARED_TLS_KEY", secret)
	t.Setenv("FARED_TLS_CA", cert)
	if out := must(t, "--socket", address, "status"); !strings.Contains(out, "v1.0.0") {
		t.Errorf("status over TLS:\n%s", out)
	}
	t.Setenv("FARED_TLS_KEY", filepath.Join(t.TempDir(), "none.pem"))
	if text := refused(t, cli.ExitUsage, "--socket", address, "status"); !strings.Contains(text, "none.pem") {
		t.Errorf("the error does not name the file: %s", text)
	}
}

// TestSocketOfTheEnvironment checks that FARED_SOCKET is the default of --socket for commands that ask the daemon, and
// not for the agent's socket.
func TestSocketOfTheEnvironment(t *testing.T) {
	t.Setenv("FARED_SOCKET", "/none/of-the-environment")
	if got := refused(t, cli.ExitUnreachable, "status"); !strings.Contains(got, "/none/of-the-environment") {
		t.Errorf("status: %s", got)
	}
	if got := refused(t, cli.ExitUnreachable, "status", "--socket", "/none/of-the-flag"); !strings.Contains(got, "/none/of-the-flag") {
		t.Errorf("status --socket: %s", got)
	}
	if got := refused(t, cli.ExitUnreachable, "dataplane", "show", "--socket", "/none/agent"); !strings.Contains(got, "/none/agent") {
		t.Errorf("dataplane show: %s", got)
	}
}

// TestUnitIsInstalled checks that the remedy of a daemon that does not answer names systemctl only where systemd runs
// and has the unit.
func TestUnitIsInstalled(t *testing.T) {
	root := t.TempDir()
	make := func(name string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(root, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	make("usr/lib/systemd/system/fared.service")
	if cli.UnitInstalled(root, "fared") {
		t.Error("a machine that systemd does not run")
	}
	make("run/systemd/system")
	if !cli.UnitInstalled(root, "fared") {
		t.Error("the unit of a package is not found")
	}
	if cli.UnitInstalled(root, "fared-dataplane") {
		t.Error("a unit that does not exist")
	}
	make("etc/systemd/system/fared-dataplane.service")
	if !cli.UnitInstalled(root, "fared-dataplane") {
		t.Error("the unit of an administrator is not found")
	}
}
