package status

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionalphapb "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/grpcserve"
	"github.com/fared/fared/internal/tlsfiles"
)

// access is the right that a call needs.
type access uint8

const (
	accessOperate access = iota // the call changes the daemon's behavior; unknown methods need this right, too
	accessRead                  // the call only reads
	accessRights                // the number of rights
)

// methods classifies every method of every service that Server registers, by its full name.
var methods = map[string]access{
	farev1.WeightService_GetWeights_FullMethodName:   accessRead,
	farev1.WeightService_ListWeights_FullMethodName:  accessRead,
	farev1.WeightService_WatchWeights_FullMethodName: accessRead,

	farev1.FabricService_GetStatus_FullMethodName:    accessRead,
	farev1.FabricService_ListSessions_FullMethodName: accessRead,
	farev1.FabricService_ListPlanes_FullMethodName:   accessRead,
	farev1.FabricService_WatchEvents_FullMethodName:  accessRead,
	farev1.FabricService_Drain_FullMethodName:        accessOperate,
	farev1.FabricService_Undrain_FullMethodName:      accessOperate,
	farev1.FabricService_ClearSession_FullMethodName: accessOperate,
	farev1.FabricService_Reload_FullMethodName:       accessOperate,
	farev1.FabricService_Ping_FullMethodName:         accessOperate, // it sends packets

	healthpb.Health_Check_FullMethodName: accessRead,
	healthpb.Health_List_FullMethodName:  accessRead,
	healthpb.Health_Watch_FullMethodName: accessRead,

	reflectionpb.ServerReflection_ServerReflectionInfo_FullMethodName:      accessRead,
	reflectionalphapb.ServerReflection_ServerReflectionInfo_FullMethodName: accessRead,
}

// accessOf returns the right of a caller at the endpoint.
func (e *endpoint) accessOf(c grpcserve.Caller) access {
	if tlsfiles.Permits(e.operators, c.Names) {
		return accessOperate
	}
	return e.access
}

// allow returns PERMISSION_DENIED for a method that needs more than the endpoint grants the caller.
func (e *endpoint) allow(c grpcserve.Caller, method string) error {
	if e.accessOf(c) == accessOperate || methods[method] == accessRead {
		return nil
	}
	if e.tls {
		return rpcError(codes.PermissionDenied, reasonPermission, fmt.Sprintf("%s is not possible on %s with the certificate of %q, which may only read: list the name in api.tls.operators%s",
			method, e.name, c.Names, e.operate))
	}
	return rpcError(codes.PermissionDenied, reasonPermission, fmt.Sprintf("%s is not possible on %s, which serves only calls that read: use %s", method, e.name, e.operate))
}

// allowUnary is the interceptor of unary calls.
func (e *endpoint) allowUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := e.allow(grpcserve.CallerOf(ctx), info.FullMethod); err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

// allowStream is the interceptor of streams.
func (e *endpoint) allowStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	caller := grpcserve.CallerOf(ss.Context())
	if err := e.allow(caller, info.FullMethod); err != nil {
		return err
	}
	return handler(srv, accessStream{ss, context.WithValue(ss.Context(), accessKey{}, e.accessOf(caller))})
}

// accessKey is the key of a caller's right in the context of its streams.
type accessKey struct{}

// accessStream is a stream whose context has the right of its caller.
type accessStream struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s accessStream) Context() context.Context { return s.ctx }

// streamAccess returns the right of the caller of a stream; accessOperate for a call inside the process.
func streamAccess(ctx context.Context) access {
	right, _ := ctx.Value(accessKey{}).(access)
	return right
}
