// In place of Tencent's module, which flannel's backend for that cloud imports and no benchmark uses.
module github.com/tencentcloud/tencentcloud-sdk-go/tencentcloud/vpc

go 1.26.0
