// Package apiserver calls the API server of Kubernetes by plain REST: JSON over HTTP/2, with the token of the pod's
// service account. Every call has a time limit and is made once; callers repeat failed ones.
package apiserver

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// timeout limits a call.
	timeout = 4 * time.Second
	// maxAnswer limits an answer and an event of a watch, bytes; a node with its images has some 100 kB.
	maxAnswer = 8 << 20
	// handshake limits the start of TLS, for which later calls wait if it takes longer than the first.
	handshake = 10 * time.Second
	// ServiceAccount is the directory of the token in a pod.
	ServiceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"
)

// Content types of patches.
const (
	Apply = "application/apply-patch+yaml"
	JSON  = "application/json-patch+json"
)

// Error is an answer of the API server other than success.
type Error struct {
	Code    int
	Message string
	Wait    time.Duration // of the header Retry-After
}

// Error implements error.
func (e *Error) Error() string {
	return fmt.Sprintf("%d %s: %s", e.Code, http.StatusText(e.Code), e.Message)
}

// Is reports whether an error is an answer with a code.
func Is(err error, code int) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}

// Refused reports whether a call certainly has had no effect: the API server has refused it, or was not reached.
func Refused(err error) bool {
	var e *Error
	var dial *net.OpError
	return errors.As(err, &e) && e.Code < 500 || errors.As(err, &dial) && dial.Op == "dial"
}

// Wait returns how long the API server asks to wait, at most limit.
func Wait(err error, limit time.Duration) time.Duration {
	var e *Error
	if !errors.As(err, &e) {
		return 0
	}
	return min(e.Wait, limit)
}

// Client calls an API server. Its methods may be called concurrently.
type Client struct {
	// Timeout limits a call, and the wait for the first byte of a watch: 4 s unless it is changed before the first
	// call.
	Timeout   time.Duration
	base, dir string
	mu        sync.Mutex // guards transport
	transport *http.Transport
}

// New returns a client of the API server at a URL, with the files token and ca.crt of a directory.
func New(base, dir string) *Client {
	return &Client{Timeout: timeout, base: strings.TrimSuffix(base, "/"), dir: dir}
}

// InCluster returns the client of a pod.
func InCluster() (*Client, error) {
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, errors.New("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: this is no pod")
	}
	return New("https://"+net.JoinHostPort(host, port), ServiceAccount), nil
}

// Do makes a call and decodes the answer into out, unless that is nil. A body that is not nil has a content type.
func (c *Client) Do(ctx context.Context, method, path, contentType string, body []byte, out any) error {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	answer, err := c.open(ctx, method, path, contentType, body)
	if err != nil {
		return err
	}
	defer answer.Close()
	text, err := io.ReadAll(io.LimitReader(answer, maxAnswer))
	if err == nil && out != nil {
		err = json.Unmarshal(text, out)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

// Watch calls each for the events of a watch until the stream ends, which is no error, or each fails. The API server
// ends a stream after the time that the path asks for.
func (c *Client) Watch(ctx context.Context, path string, each func(kind string, object json.RawMessage) error) error {
	answer, err := c.open(ctx, http.MethodGet, path, "", nil)
	if err != nil {
		return err
	}
	defer answer.Close()
	size := &limited{r: answer}
	for in := json.NewDecoder(size); ; {
		var event struct {
			Type   string
			Object json.RawMessage
		}
		if err := in.Decode(&event); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("watch %s: %w", path, err)
		}
		size.n = 0
		if event.Type == "ERROR" {
			return fmt.Errorf("watch %s: %s", path, event.Object)
		}
		if err := each(event.Type, event.Object); err != nil {
			return err
		}
	}
}

// limited fails once a reader has returned too much since n was 0.
type limited struct {
	r io.Reader
	n int
}

// Read implements io.Reader.
func (l *limited) Read(b []byte) (int, error) {
	if l.n > maxAnswer {
		return 0, errors.New("an event is too large")
	}
	n, err := l.r.Read(b)
	l.n += n
	return n, err
}

// open makes a call and returns the body of a successful answer.
func (c *Client) open(ctx context.Context, method, path, contentType string, body []byte) (io.ReadCloser, error) {
	transport, err := c.connect()
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	// The kubelet replaces the token before it expires, so each call reads it.
	token, err := os.ReadFile(filepath.Join(c.dir, "token"))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	request.Header.Set("Accept", "application/json")
	request.Header.Set("User-Agent", "fared-kube")
	if contentType != "" {
		request.Header.Set("Content-Type", contentType)
	}
	answer, err := transport.RoundTrip(request)
	if err != nil {
		// A call that ends by its time keeps the connection, or the attempt to connect, for others: thousands of nodes
		// that begin a handshake again cost a busy server more than their calls.
		if late := net.Error(nil); !errors.As(err, &late) || !late.Timeout() {
			c.disconnect(transport)
		}
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	if answer.StatusCode >= 300 {
		defer answer.Body.Close()
		return nil, fmt.Errorf("%s %s: %w", method, path, failure(answer))
	}
	return answer.Body, nil
}

// failure returns the error of an answer.
func failure(answer *http.Response) *Error {
	e := &Error{Code: answer.StatusCode}
	if seconds, err := strconv.Atoi(answer.Header.Get("Retry-After")); err == nil && seconds > 0 {
		e.Wait = time.Duration(min(seconds, 3600)) * time.Second
	}
	var status struct{ Message string }
	text, _ := io.ReadAll(io.LimitReader(answer.Body, 4096))
	if e.Message = string(text); json.Unmarshal(text, &status) == nil && status.Message != "" {
		e.Message = status.Message
	}
	return e
}

// connect returns the transport, which reads the certificates of authorities when it is made.
func (c *Client) connect() (*http.Transport, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.transport != nil {
		return c.transport, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if strings.HasPrefix(c.base, "https:") {
		pem, err := os.ReadFile(filepath.Join(c.dir, "ca.crt"))
		if err != nil {
			return nil, err
		}
		if config.RootCAs = x509.NewCertPool(); !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s has no certificate", filepath.Join(c.dir, "ca.crt"))
		}
	}
	// An API server that vanishes is noticed after 15 s by the pings of HTTP/2, which one without a free processor
	// answers late.
	dialer := net.Dialer{Timeout: c.Timeout, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 2}}
	c.transport = &http.Transport{DialContext: dialer.DialContext, TLSClientConfig: config, TLSHandshakeTimeout: handshake,
		ResponseHeaderTimeout: c.Timeout, MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute,
		ForceAttemptHTTP2: true, HTTP2: &http.HTTP2Config{SendPingTimeout: 5 * time.Second, PingTimeout: 10 * time.Second}}
	return c.transport, nil
}

// disconnect drops the transport of a failed call: the next one connects, with the present certificates.
func (c *Client) disconnect(failed *http.Transport) {
	failed.CloseIdleConnections()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.transport == failed {
		c.transport = nil
	}
}

// Discover returns the first version of a group that serves a resource, in the server's order of preference.
func (c *Client) Discover(ctx context.Context, group, resource string) (version string, err error) {
	var known struct{ Versions []struct{ Version string } }
	if err := c.Do(ctx, http.MethodGet, "/apis/"+url.PathEscape(group), "", nil, &known); err != nil {
		return "", err
	}
	for _, v := range known.Versions {
		var served struct{ Resources []struct{ Name string } }
		if err := c.Do(ctx, http.MethodGet, "/apis/"+url.PathEscape(group)+"/"+url.PathEscape(v.Version), "", nil, &served); err != nil {
			return "", err
		}
		for _, r := range served.Resources {
			if r.Name == resource {
				return v.Version, nil
			}
		}
	}
	return "", &Error{Code: http.StatusNotFound, Message: fmt.Sprintf("no version of %s serves %s", group, resource)}
}
