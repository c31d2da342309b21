package status

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Kind is the kind of a Problem, which determines the caller's next step.
type Kind uint8

// Kinds of problems. The zero value is a fault of the daemon.
const (
	Internal    Kind = iota // no remedy: a fault of the daemon
	Invalid                 // change the request
	NotFound                // name an existing object
	Refused                 // change the state first (e.g. the configuration file), then retry
	Unavailable             // retry later
)

// Problem is an error of the functions of ServiceConfig that contains a remedy for the caller. Other errors become
// INTERNAL.
type Problem struct {
	Kind Kind
	// Subject is the object of the problem: a field of the request for Invalid, a name for NotFound, else a short name.
	Subject string
	// Remedy describes the next step, in one sentence.
	Remedy string
	Err    error
}

// Error returns the problem and its remedy, which is a line if the problem is a list.
func (p *Problem) Error() string {
	s := p.Err.Error()
	if p.Subject != "" {
		s = p.Subject + ": " + s
	}
	if p.Remedy == "" {
		return s
	}
	if strings.Contains(s, "\n") {
		return s + "\n" + p.Remedy
	}
	return s + ": " + p.Remedy
}

// Unwrap returns the cause.
func (p *Problem) Unwrap() error { return p.Err }

// errorDomain is google.rpc.ErrorInfo.domain of every error.
const errorDomain = "fare.v1"

// Reasons in google.rpc.ErrorInfo, for programs.
const (
	reasonInvalid     = "INVALID_REQUEST"
	reasonNotFound    = "NOT_FOUND"
	reasonRefused     = "REFUSED"
	reasonUnavailable = "LOOP_UNAVAILABLE"
	reasonStopping    = "STOPPING"
	reasonWatches     = "TOO_MANY_WATCHES"
	reasonPermission  = "READ_ONLY"
	reasonInternal    = "INTERNAL"
)

// retryAfter is the retry delay that callers receive with UNAVAILABLE.
const retryAfter = time.Second

// fieldError is an invalid field of a request.
type fieldError struct{ field, text string }

// fieldErrors lists all invalid fields of a request.
type fieldErrors []fieldError

func (e fieldErrors) Error() string {
	lines := make([]string, len(e))
	for i, f := range e {
		lines[i] = f.field + ": " + f.text
	}
	return strings.Join(lines, "; ")
}

// rpcError returns a gRPC error with details.
func rpcError(code codes.Code, reason, message string, details ...protoadapt.MessageV1) error {
	all := append([]protoadapt.MessageV1{&errdetails.ErrorInfo{Reason: reason, Domain: errorDomain}}, details...)
	s, err := grpcstatus.New(code, message).WithDetails(all...)
	if err != nil { // a detail that cannot be marshaled is less important than the error itself
		return grpcstatus.Error(code, message)
	}
	return s.Err()
}

// toRPC converts any error of this package's callees to a gRPC error with a remedy.
func toRPC(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := grpcstatus.FromError(err); ok {
		return err
	}
	var fields fieldErrors
	var p *Problem
	switch {
	case errors.As(err, &fields):
		bad := &errdetails.BadRequest{}
		for _, f := range fields {
			bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{Field: f.field, Description: f.text})
		}
		return rpcError(codes.InvalidArgument, reasonInvalid, fields.Error(), bad)
	case errors.As(err, &p):
		return p.rpc()
	case errors.Is(err, context.Canceled):
		return grpcstatus.Error(codes.Canceled, err.Error())
	case errors.Is(err, context.DeadlineExceeded):
		return rpcError(codes.DeadlineExceeded, reasonUnavailable,
			fmt.Sprintf("%v: the daemon did not answer in time: retry, with a longer deadline if it is busy", err), retryInfo())
	}
	return rpcError(codes.Internal, reasonInternal, err.Error())
}

func (p *Problem) rpc() error {
	switch p.Kind {
	case Invalid:
		return rpcError(codes.InvalidArgument, reasonInvalid, p.Error(), &errdetails.BadRequest{
			FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: p.Subject, Description: p.Err.Error() + ": " + p.Remedy}},
		})
	case NotFound:
		return rpcError(codes.NotFound, reasonNotFound, p.Error(), &errdetails.ResourceInfo{ResourceName: p.Subject, Description: p.Remedy})
	case Refused:
		return rpcError(codes.FailedPrecondition, reasonRefused, p.Error(), &errdetails.PreconditionFailure{
			Violations: []*errdetails.PreconditionFailure_Violation{{Type: reasonRefused, Subject: p.Subject, Description: p.Err.Error()}},
		})
	case Unavailable:
		return rpcError(codes.Unavailable, reasonUnavailable, p.Error(), retryInfo())
	}
	return rpcError(codes.Internal, reasonInternal, p.Error())
}

func retryInfo() *errdetails.RetryInfo {
	return &errdetails.RetryInfo{RetryDelay: durationpb.New(retryAfter)}
}

// loopError converts an error of Do: it is the caller's own, or the loop is unavailable.
func loopError(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil {
		return toRPC(err)
	}
	return toRPC(&Problem{Kind: Unavailable, Err: err, Remedy: "the daemon is starting or stopping, retry"})
}
