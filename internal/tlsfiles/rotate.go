package tlsfiles

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
)

// rotating are files of mutual TLS that may be replaced at any time, in any order. Each handshake uses the files of
// that moment; while they cannot be loaded, for example because the key does not belong to the certificate yet, it uses
// the last ones that could.
type rotating struct {
	certFile, keyFile, caFile string
	log                       *slog.Logger

	mu     sync.Mutex
	stamps [3]stamp
	loaded loaded
	// complaint is the last reported error, "" after a success.
	complaint string
}

// stamp identifies the content of a file. A symbolic link counts as the file that it leads to, as in Kubernetes'
// secrets.
type stamp struct {
	info os.FileInfo
	size int64
	at   time.Time
}

func stampOf(file string) stamp {
	info, err := os.Stat(file)
	if err != nil {
		return stamp{}
	}
	return stamp{info, info.Size(), info.ModTime()}
}

func (s stamp) same(o stamp) bool {
	return s.info != nil && o.info != nil && os.SameFile(s.info, o.info) && s.size == o.size && s.at.Equal(o.at)
}

func rotate(certFile, keyFile, caFile string, log *slog.Logger) (*rotating, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	r := &rotating{certFile: certFile, keyFile: keyFile, caFile: caFile, log: log}
	r.stamps = r.look()
	var err error
	r.loaded, err = load(certFile, keyFile, caFile)
	return r, err
}

func (r *rotating) look() [3]stamp {
	return [3]stamp{stampOf(r.certFile), stampOf(r.keyFile), stampOf(r.caFile)}
}

// current returns the content of the files.
func (r *rotating) current() loaded {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.look() // before the files are read, so that a later change is noticed
	if now[0].same(r.stamps[0]) && now[1].same(r.stamps[1]) && now[2].same(r.stamps[2]) {
		return r.loaded
	}
	next, err := load(r.certFile, r.keyFile, r.caFile)
	if err != nil {
		if text := err.Error(); text != r.complaint {
			r.complaint = text
			r.log.Warn("the files of TLS have changed and cannot be used; the previous ones stay in use", "error", err)
		}
		return r.loaded
	}
	r.stamps, r.loaded, r.complaint = now, next, ""
	r.log.Info("the files of TLS have changed", "certificate", r.certFile, "not_after", next.cert.Leaf.NotAfter)
	return next
}

// Server returns a configuration that demands a client certificate signed by an authority in caFile. Replaced files
// count from the next connection on; the log, which may be nil, reports them.
func Server(certFile, keyFile, caFile string, log *slog.Logger) (*tls.Config, error) {
	r, err := rotate(certFile, keyFile, caFile, log)
	if err != nil {
		return nil, err
	}
	config := func() *tls.Config {
		files := r.current()
		return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{files.cert}, ClientCAs: files.authorities, ClientAuth: tls.RequireAndVerifyClientCert}
	}
	out := config()
	out.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return config(), nil }
	return out, nil
}

// Credentials returns a gRPC client's credentials that present the certificate and trust only the authorities in
// caFile. Replaced files count from the next connection on; the log, which may be nil, reports them.
func Credentials(certFile, keyFile, caFile string, log *slog.Logger) (credentials.TransportCredentials, error) {
	r, err := rotate(certFile, keyFile, caFile, log)
	if err != nil {
		return nil, err
	}
	return &client{TransportCredentials: credentials.NewTLS(clientConfig(r.loaded)), files: r}, nil
}

// client are credentials that read their files at each handshake.
type client struct {
	credentials.TransportCredentials // for what does not depend on the files
	files                            *rotating
}

// ClientHandshake implements credentials.TransportCredentials.
func (c *client) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return credentials.NewTLS(clientConfig(c.files.current())).ClientHandshake(ctx, authority, conn)
}

// Clone implements credentials.TransportCredentials.
func (c *client) Clone() credentials.TransportCredentials {
	return &client{c.TransportCredentials.Clone(), c.files}
}

// loaded is the content of the files.
type loaded struct {
	cert        tls.Certificate
	authorities *x509.CertPool
}

func clientConfig(files loaded) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{files.cert}, RootCAs: files.authorities}
}
