// Package v20170312 has what flannel's backend for Tencent's cloud names. Nothing of it works.
package v20170312

import "errors"

var errAbsent = errors.New("this flanneld is built without Tencent's module")

type Client struct{}

func NewClientWithSecretId(_, _, _ string) (*Client, error) { return nil, errAbsent }

type Filter struct {
	Name   *string
	Values []*string
}

type Route struct {
	RouteId              *uint64
	DestinationCidrBlock *string
	GatewayType          *string
	GatewayId            *string
	RouteType            *string
	Enabled              *bool
}

type RouteTable struct {
	RouteTableId *string
	RouteSet     []*Route
}

type DescribeRouteTablesRequest struct{ Filters []*Filter }

func NewDescribeRouteTablesRequest() *DescribeRouteTablesRequest { return &DescribeRouteTablesRequest{} }

type DescribeRouteTablesResponse struct{ Response *DescribedRouteTables }

type DescribedRouteTables struct{ RouteTableSet []*RouteTable }

func (*Client) DescribeRouteTables(*DescribeRouteTablesRequest) (*DescribeRouteTablesResponse, error) {
	return nil, errAbsent
}

type DeleteRoutesRequest struct {
	RouteTableId *string
	Routes       []*Route
}

func NewDeleteRoutesRequest() *DeleteRoutesRequest { return &DeleteRoutesRequest{} }

func (*Client) DeleteRoutes(*DeleteRoutesRequest) (any, error) { return nil, errAbsent }

type CreateRoutesRequest struct {
	RouteTableId *string
	Routes       []*Route
}

func NewCreateRoutesRequest() *CreateRoutesRequest { return &CreateRoutesRequest{} }

func (*Client) CreateRoutes(*CreateRoutesRequest) (any, error) { return nil, errAbsent }
