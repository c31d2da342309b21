// Package tlsfiles loads mutual TLS configurations from PEM files.
package tlsfiles

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
)

// Client returns a configuration for one connection that presents the certificate and trusts only the authorities in
// caFile.
func Client(certFile, keyFile, caFile string) (*tls.Config, error) {
	files, err := load(certFile, keyFile, caFile)
	if err != nil {
		return nil, err
	}
	return clientConfig(files), nil
}

func load(certFile, keyFile, caFile string) (loaded, error) {
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return loaded{}, fmt.Errorf("certificate %s with key %s: %w", certFile, keyFile, err)
	}
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return loaded{}, fmt.Errorf("certificate authorities: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return loaded{}, fmt.Errorf("certificate authorities: %s holds no PEM certificate", caFile)
	}
	return loaded{cert, pool}, nil
}
