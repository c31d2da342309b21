package agent

import (
	"context"
	"path"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionalphapb "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/grpcserve"
	"github.com/fared/fared/internal/tlsfiles"
)

// reads has the methods that only read, by their full name. All others need the right to program.
var reads = map[string]bool{
	farev1.DataplaneService_Snapshot_FullMethodName: true,
	farev1.DataplaneService_Landing_FullMethodName:  true,
	farev1.DataplaneService_Counters_FullMethodName: true,

	farev1.AttachService_ListAttachments_FullMethodName: true,

	healthpb.Health_Check_FullMethodName: true,
	healthpb.Health_List_FullMethodName:  true,
	healthpb.Health_Watch_FullMethodName: true,

	reflectionpb.ServerReflection_ServerReflectionInfo_FullMethodName:      true,
	reflectionalphapb.ServerReflection_ServerReflectionInfo_FullMethodName: true,
}

// allow returns PERMISSION_DENIED for a method that needs more than the endpoint grants the caller.
func (e *endpoint) allow(c grpcserve.Caller, method string) error {
	if e.programs || reads[method] || tlsfiles.Permits(e.clients, c.Names) {
		return nil
	}
	if e.tls {
		return status.Errorf(codes.PermissionDenied, "%s is not possible on %s with the certificate of %q, which may only read: name it with --tls-client, or use the agent's socket",
			method, e.address, c.Names)
	}
	return status.Errorf(codes.PermissionDenied, "%s is not possible on %s, where every local user may connect: use the agent's socket, or TLS and --tls-client", method, e.address)
}

// unary is the interceptor of unary calls.
func (a *Agent) unary(e *endpoint) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (response any, err error) {
		caller := grpcserve.CallerOf(ctx)
		if err = e.allow(caller, info.FullMethod); err == nil {
			response, err = handler(ctx, request)
		}
		a.audit(caller, info.FullMethod, err)
		return response, err
	}
}

// stream is the interceptor of streams. A stream that is allowed is logged when it begins, and again when it ends.
func (a *Agent) stream(e *endpoint) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		caller := grpcserve.CallerOf(stream.Context())
		err := e.allow(caller, info.FullMethod)
		a.audit(caller, info.FullMethod, err)
		if err != nil {
			return err
		}
		err = handler(srv, stream)
		if !reads[info.FullMethod] {
			a.log.Info("call ended", "method", path.Base(info.FullMethod), "by", caller.String(), "result", status.Code(err).String(), "error", status.Convert(err).Message())
		}
		return err
	}
}

// audit logs a call that needs the right to program, and its result.
func (a *Agent) audit(caller grpcserve.Caller, method string, err error) {
	if reads[method] {
		return
	}
	name := path.Base(method)
	if err == nil {
		a.log.Info("call", "method", name, "by", caller.String(), "result", codes.OK.String())
		return
	}
	if missed, ok := a.refusals.Record(caller.Client(), time.Now()); ok {
		a.log.Warn("call", "method", name, "by", caller.String(), "result", status.Code(err).String(), "error", status.Convert(err).Message(), "more_refused_before", missed)
	}
}
