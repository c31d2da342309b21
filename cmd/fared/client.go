package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/internal/tlsfiles"
)

const defaultSocket = "/run/fared/fared.sock"

// dial opens a client connection to the daemon. It does not wait: the first call says whether the daemon answers.
func (e *env) dial() (*grpc.ClientConn, error) {
	target, creds := e.socket, credentials.TransportCredentials(insecure.NewCredentials())
	if strings.HasPrefix(target, "/") || strings.HasPrefix(target, ".") || !strings.Contains(target, ":") {
		target = "unix:" + target
	}
	if !strings.HasPrefix(target, "unix:") {
		if cert := os.Getenv("FARED_TLS_CERT"); cert != "" {
			cfg, err := tlsfiles.Client(cert, os.Getenv("FARED_TLS_KEY"), os.Getenv("FARED_TLS_CA"))
			if err != nil {
				return nil, &exitError{exitUsage, err, "FARED_TLS_CERT, FARED_TLS_KEY and FARED_TLS_CA name PEM files"}
			}
			creds = credentials.NewTLS(cfg)
		}
		target = "dns:" + target
	}
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(creds), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return nil, &exitError{exitUsage, err, "--socket takes a unix socket's path or host:port"}
	}
	return conn, nil
}

// explain turns an RPC's error into an exit code and a remedy.
func (e *env) explain(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, context.Canceled) {
		return &exitError{code: exitFailed, err: errors.New("interrupted")}
	}
	st, _ := status.FromError(err)
	switch st.Code() {
	case codes.Unavailable:
		return &exitError{exitUnreachable, fmt.Errorf("no daemon answers at %s: %s", e.socket, st.Message()),
			"is fared running? start it with 'fared run --config FILE', or name its socket with --socket"}
	case codes.NotFound:
		return &exitError{exitNotFound, errors.New(st.Message()), "'fared weights' lists what is known"}
	case codes.InvalidArgument:
		return &exitError{code: exitUsage, err: errors.New(st.Message())}
	case codes.Canceled:
		return &exitError{code: exitFailed, err: errors.New("interrupted")}
	default:
		return &exitError{code: exitFailed, err: fmt.Errorf("%s (%s)", st.Message(), st.Code())}
	}
}
