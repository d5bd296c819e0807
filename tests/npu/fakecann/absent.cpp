// What torch_npu is linked with, so that it has to be there, and which does nothing here.
#include "fakecann.h"

#include <cstdio>
#include <cstdlib>

// An operator without a kernel of ours in kernels.cpp: stop, since an error would come out late or never.
API int aclopCompileAndExecute(const char* name) {
  fprintf(stderr, "[fake CANN] there is no kernel for the operator %s\n", name);
  abort();
}

#define DOES_NOTHING(name) \
  API int name() { return kSuccess; }
#define IS_AN_ERROR(name) \
  API int name() { return fail(kNotSupported, #name " is not there"); }
#define RETURNS_A_HANDLE(name) \
  API void* name() { return malloc(1); }

DOES_NOTHING(aclAppLog)
DOES_NOTHING(aclFinalize)

DOES_NOTHING(aclSetCompileopt)
DOES_NOTHING(aclrtCtxSetSysParamOpt)
DOES_NOTHING(aclrtDeviceEnablePeerAccess)
DOES_NOTHING(aclrtSetDeviceSatMode)
DOES_NOTHING(aclrtSetOpExecuteTimeOut)
DOES_NOTHING(aclrtSetOpWaitTimeout)
DOES_NOTHING(aclrtSetStreamFailureMode)

DOES_NOTHING(MsprofGetHashId)
DOES_NOTHING(MsprofRegisterCallback)
DOES_NOTHING(MsprofReportAdditionalInfo)
DOES_NOTHING(MsprofReportApi)
DOES_NOTHING(MsprofReportCompactInfo)
DOES_NOTHING(MsprofSysCycleTime)
DOES_NOTHING(aclmdlFinalizeDump)
DOES_NOTHING(aclmdlInitDump)
DOES_NOTHING(aclmdlSetDump)

// Operators by attributes and descriptors; they end in aclopCompileAndExecute.
RETURNS_A_HANDLE(aclopCreateAttr)
RETURNS_A_HANDLE(aclCreateDataBuffer)
RETURNS_A_HANDLE(aclCreateTensorDesc)
DOES_NOTHING(aclDestroyDataBuffer)
DOES_NOTHING(aclDestroyTensorDesc)
DOES_NOTHING(aclGetTensorDescDimV2)
DOES_NOTHING(aclGetTensorDescFormat)
DOES_NOTHING(aclGetTensorDescNumDims)
DOES_NOTHING(aclGetTensorDescType)
DOES_NOTHING(aclSetTensorDescName)
DOES_NOTHING(aclSetTensorFormat)
DOES_NOTHING(aclSetTensorPlaceMent)
DOES_NOTHING(aclSetTensorShape)
DOES_NOTHING(aclopDestroyAttr)
DOES_NOTHING(aclopSetAttrBool)
DOES_NOTHING(aclopSetAttrDataType)
DOES_NOTHING(aclopSetAttrFloat)
DOES_NOTHING(aclopSetAttrInt)
DOES_NOTHING(aclopSetAttrListBool)
DOES_NOTHING(aclopSetAttrListFloat)
DOES_NOTHING(aclopSetAttrListInt)
DOES_NOTHING(aclopSetAttrListListInt)
DOES_NOTHING(aclopSetAttrString)

IS_AN_ERROR(aclrtBinaryGetFunction)
IS_AN_ERROR(aclrtBinaryLoadFromData)
IS_AN_ERROR(aclrtFreePhysical)
IS_AN_ERROR(aclrtGetFunctionAddr)
IS_AN_ERROR(aclrtMallocPhysical)
IS_AN_ERROR(aclrtMapMem)
IS_AN_ERROR(aclrtMemExportToShareableHandle)
IS_AN_ERROR(aclrtMemImportFromShareableHandle)
IS_AN_ERROR(aclrtMemSetPidToShareableHandle)
IS_AN_ERROR(aclrtReleaseMemAddress)
IS_AN_ERROR(aclrtReserveMemAddress)
IS_AN_ERROR(aclrtUnmapMem)
IS_AN_ERROR(rtDevBinaryRegister)
IS_AN_ERROR(rtFunctionRegister)
IS_AN_ERROR(rtGetC2cCtrlAddr)
IS_AN_ERROR(rtKernelLaunch)
