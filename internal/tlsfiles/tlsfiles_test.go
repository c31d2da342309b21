package tlsfiles

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// issue writes a certificate and its key, signed by parent (nil means self-signed), and returns them.
func issue(t *testing.T, dir, name string, parent *x509.Certificate, parentKey *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: parent == nil, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	if parent == nil {
		parent, parentKey = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, parentKey)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, name+".crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	write(t, filepath.Join(dir, name+".key"), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER}))
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// handshake runs one TLS handshake over a pipe and returns the server's verdict.
func handshake(server, client *tls.Config) error {
	a, b := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		c := tls.Client(b, client)
		_ = c.Handshake()
		_, _ = c.Read(make([]byte, 1)) // a TLS 1.3 client learns of a refusal by reading
		c.Close()
	}()
	s := tls.Server(a, server)
	err := s.Handshake()
	s.Close()
	<-done
	return err
}

func TestMutualTLS(t *testing.T) {
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	ca, caKey := issue(t, dir, "ca", nil, nil)
	issue(t, dir, "server", ca, caKey)
	issue(t, dir, "client", ca, caKey)
	stranger, strangerKey := issue(t, dir, "other-ca", nil, nil)
	issue(t, dir, "stranger", stranger, strangerKey)

	server, err := Server(file("server.crt"), file("server.key"), file("ca.crt"), nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"client": true, "stranger": false} {
		client, err := Client(file(name+".crt"), file(name+".key"), file("ca.crt"))
		if err != nil {
			t.Fatal(err)
		}
		client.ServerName = "localhost"
		if err := handshake(server, client); (err == nil) != want {
			t.Errorf("%s: handshake: %v, want success %v", name, err, want)
		}
	}
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	if err := handshake(server, &tls.Config{RootCAs: pool, ServerName: "localhost"}); err == nil {
		t.Error("a client without a certificate was let in")
	}
}

func TestErrorsNameTheFile(t *testing.T) {
	dir := t.TempDir()
	issue(t, dir, "ca", nil, nil)
	crt, key, none := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key"), filepath.Join(dir, "none")
	write(t, filepath.Join(dir, "empty"), nil)
	for _, c := range []struct{ cert, key, ca, want string }{
		{none, key, crt, none}, {crt, none, crt, none}, {crt, key, none, none}, {crt, key, filepath.Join(dir, "empty"), "holds no PEM certificate"},
	} {
		if _, err := Server(c.cert, c.key, c.ca, nil); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("Server(%s, %s, %s): %v, want an error with %q", c.cert, c.key, c.ca, err, c.want)
		}
		if _, err := Client(c.cert, c.key, c.ca); err == nil {
			t.Errorf("Client(%s, %s, %s) succeeded", c.cert, c.key, c.ca)
		}
	}
}
