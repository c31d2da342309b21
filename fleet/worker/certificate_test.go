package worker

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"log/slog"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/topo"
)

// authority signs certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// issue returns a certificate with a common name and DNS names; without an authority it is one.
func (a *authority) issue(common string, names ...string) tls.Certificate {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: common}, DNSNames: names, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), BasicConstraintsValid: true, IsCA: a.cert == nil}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	if a.cert == nil {
		if a.cert, err = x509.ParseCertificate(der); err != nil {
			a.t.Fatal(err)
		}
		a.key = key
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// TestCertificates lets a node report for the name of its certificate alone.
func TestCertificates(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 12})
	a := &authority{t: t}
	a.issue("authority")
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	l := listen(t)
	w := New(Config{Fabric: f, Log: slog.New(slog.DiscardHandler)})
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{a.issue("fleet1")}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: roots, MinVersion: tls.VersionTLS13})))
	fleetv1.RegisterFleetServiceServer(s, w)
	go s.Serve(l)
	t.Cleanup(s.Stop)
	for _, c := range []struct {
		cert tls.Certificate
		node string
		want codes.Code
	}{
		{a.issue("server1"), "server1", codes.OK},
		{a.issue("", "gpu-a.example", "Server2.example"), "server2", codes.OK},
		{a.issue(f.Server[2].ID.String()), "server3", codes.OK},
		{a.issue("server1"), "server2", codes.PermissionDenied},
		{a.issue("server1"), "server11", codes.PermissionDenied},
		{a.issue("server1", "operators"), "server1", codes.PermissionDenied}, // names in the certificate replace the common name
		{a.issue("leaf0"), "leaf0", codes.OK},
		{a.issue(""), "server1", codes.PermissionDenied},
	} {
		conn, err := grpc.NewClient("passthrough:///"+l.Addr().String(), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{c.cert}, RootCAs: roots})))
		if err != nil {
			t.Fatal(err)
		}
		stream, err := fleetv1.NewFleetServiceClient(conn).Report(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&fleetv1.ReportRequest{RouterId: f.Node(c.node).ID.String(), ConnectionNs: 1, Revision: 1}); err != nil {
			t.Fatal(err)
		}
		_, err = stream.Recv()
		if status.Code(err) != c.want || c.want != codes.OK && !strings.Contains(err.Error(), c.node+".DOMAIN") {
			t.Errorf("%s: %v, want %v", c.node, err, c.want)
		}
		conn.Close()
	}
}
