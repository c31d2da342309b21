package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/internal/tlsfiles"
)

const (
	defaultSocket = "/run/fared/fared.sock"
	// Patience limits the answer time of a daemon that accepts connections.
	Patience = 10 * time.Second
)

// Dial opens a client connection to the daemon without waiting: the first call shows whether the daemon answers.
func (e *Env) Dial() (*grpc.ClientConn, error) { return e.DialAt(e.Socket) }

// DialAt opens a client connection to a unix socket's path or host:port, as dial.
func (e *Env) DialAt(target string) (*grpc.ClientConn, error) {
	creds := credentials.TransportCredentials(insecure.NewCredentials())
	if strings.HasPrefix(target, "/") || strings.HasPrefix(target, ".") || !strings.Contains(target, ":") {
		target = "unix:" + target
	}
	if !strings.HasPrefix(target, "unix:") {
		if cert := os.Getenv("FARED_TLS_CERT"); cert != "" {
			cfg, err := tlsfiles.Client(cert, os.Getenv("FARED_TLS_KEY"), os.Getenv("FARED_TLS_CA"))
			if err != nil {
				return nil, Usage(err, "FARED_TLS_CERT, FARED_TLS_KEY and FARED_TLS_CA name PEM files")
			}
			creds = credentials.NewTLS(cfg)
		}
		target = "dns:" + target
	}
	retry := backoff.DefaultConfig
	retry.BaseDelay, retry.MaxDelay = 50*time.Millisecond, time.Second // a watch resumes soon after the daemon has restarted
	options := []grpc.DialOption{}
	if path, is := strings.CutPrefix(target, "unix:"); is && !strings.HasPrefix(path, "@") {
		options = append(options, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return dialSocket(ctx, strings.TrimPrefix(path, "//"))
		}))
	}
	conn, err := grpc.NewClient(target, append(options, grpc.WithTransportCredentials(creds),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry, MinConnectTimeout: 5 * time.Second}),
		// Keepalive ends the stream of a hung daemon or a vanished machine after 20 s; the daemon allows a ping every 5
		// s.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			if !slices.Contains(opts, grpc.WaitForReady(true)) {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, e.Patience)
				defer cancel()
			}
			return invoke(ctx, method, req, reply, cc, opts...)
		}))...)
	if err != nil {
		return nil, Usage(err, "--socket takes a unix socket's path or host:port")
	}
	return conn, nil
}

// dialSocket connects to a unix socket of the daemon, or to the read-only socket next to it if this user may not write
// to the former. It returns the first socket's error if neither is usable.
func dialSocket(ctx context.Context, path string) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if errors.Is(err, fs.ErrPermission) {
		if readOnly, rerr := d.DialContext(ctx, "unix", config.ReadOnlySocketOf(path)); rerr == nil {
			return readOnly, nil
		}
	}
	return conn, err
}

// Explain turns an RPC's error into an exit code and a remedy; where names the command that lists the existing objects.
func (e *Env) Explain(err error, where string) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, context.Canceled) {
		return Interrupted()
	}
	st, _ := status.FromError(err)
	switch st.Code() {
	case codes.Unavailable:
		why := Reason(st.Message())
		remedy := "is fared running? start it with 'fared run --config FILE', or name its socket with --socket"
		if e.Socket == defaultSocket && UnitInstalled("/", "fared") {
			remedy = UnitRemedy("fared")
		}
		if strings.Contains(why, "permission denied") {
			remedy = "use sudo, or join the group that 'ls -l " + e.Socket + "' shows"
		}
		return Unreachable(fmt.Errorf("no daemon answers at %s: %s", e.Socket, why), remedy)
	case codes.DeadlineExceeded:
		return Unreachable(fmt.Errorf("the daemon at %s does not answer within %s", e.Socket, e.Patience), "see the daemon's log; under systemd the watchdog restarts a daemon that hangs")
	case codes.NotFound:
		return NotFound(errors.New(st.Message()), where)
	case codes.InvalidArgument:
		return Usage(errors.New(st.Message()), where)
	case codes.FailedPrecondition:
		return Failed(errors.New(st.Message()), "the daemon is unchanged")
	case codes.PermissionDenied:
		return Failed(errors.New(st.Message()), "use sudo, or join the group that 'ls -l "+e.Socket+"' shows")
	case codes.Unimplemented:
		return Failed(errors.New(st.Message()), "the daemon and this command have different versions: compare 'fared version' with 'fared status'")
	case codes.Canceled:
		return Interrupted()
	default:
		return Failed(fmt.Errorf("%s (%s)", st.Message(), st.Code()), "see the daemon's log")
	}
}

// UnitInstalled reports whether systemd runs this machine, and has a file of a service. root is the root of the file
// system.
func UnitInstalled(root, service string) bool {
	if _, err := os.Stat(filepath.Join(root, "run/systemd/system")); err != nil {
		return false
	}
	return slices.ContainsFunc([]string{"etc", "run", "usr/local/lib", "usr/lib", "lib"}, func(dir string) bool { // systemd.unit(5)
		_, err := os.Stat(filepath.Join(root, dir, "systemd/system", service+".service"))
		return err == nil
	})
}

// UnitRemedy is the remedy for a service of systemd that does not answer.
func UnitRemedy(service string) string {
	return fmt.Sprintf("'systemctl status %[1]s' shows why; 'systemctl start %[1]s' starts it", service)
}

// Interrupted returns the error of an unfinished command.
func Interrupted() error {
	return Failed(errors.New("interrupted"), "nothing is left behind; run it again")
}

// Reason extracts the system's error text from gRPC's message about a connection.
func Reason(message string) string {
	for _, mark := range []string{"connect: ", "Error while dialing: "} {
		if _, after, ok := strings.Cut(message, mark); ok {
			return strings.TrimSuffix(after, `"`)
		}
	}
	return message
}
