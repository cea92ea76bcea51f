"""Refusals of Google and its provider, with original texts: exit code, cause and fix of each."""

from __future__ import annotations

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.pulumi.failures import explain
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.stacks import Capture, own_key
from tests.orchestrate.cloud.test_failures import failed

_DENIED = "denied on resource (or it may not exist)., forbidden"
# As reported by users of Google's provider, with the repository and issue number above each,
# with this project's names. The engine puts "1 error occurred: * " around them. A case without a
# number has no published report: its text is composed from those of the same kind.
CASES = {
    # terraform-provider-google 11208, cluster-in-the-cloud 51: the older and the newer wording
    "permission": (
        "Error creating service account: googleapi: Error 403: Permission "
        f"'iam.serviceAccounts.create' {_DENIED}",
        ExitCode.AUTH,
        "iam.serviceAccounts.create is in roles/iam.serviceAccountAdmin. The project's owner",
        "gcloud projects add-iam-policy-binding PROJECT --member=user:YOU --role=roles/iam.serv",
    ),
    "permission, older": (
        "Error creating service account: googleapi: Error 403: Permission "
        "iam.serviceAccounts.create is required to perform this operation on project "
        "projects/acme-lab., forbidden",
        ExitCode.AUTH,
        "iam.serviceAccounts.create is in roles/iam.serviceAccountAdmin",
        "gcloud projects add-iam-policy-binding acme-lab --member",
    ),
    "a permission of no known service": (
        "googleapi: Error 403: Permission 'logging.buckets.get' " + _DENIED,
        ExitCode.AUTH,
        "logging.buckets.get",
        "Request the roles in docs/guides/roles.md",
    ),
    # ansible-collections/google.cloud 575, terraform-provider-google 1564
    "a foreign bucket": (
        'Error applying IAM policy for storage bucket "b/acme-results": Error retrieving IAM '
        'policy for storage bucket "b/acme-results": googleapi: Error 403: ann@example.com does '
        "not have storage.buckets.getIamPolicy access to the Google Cloud Storage bucket. "
        f"Permission 'storage.buckets.getIamPolicy' {_DENIED}",
        ExitCode.AUTH,
        "The bucket belongs to another project, or this login has no access",
        "gcloud storage buckets add-iam-policy-binding gs://acme-results --member=user:YOU",
    ),
    "a mistyped bucket": (
        'Error applying IAM policy for storage bucket "b/acme-reslts": Error retrieving IAM policy '
        'for storage bucket "b/acme-reslts": googleapi: Error 404: The specified bucket does not '
        "exist., notFound",
        ExitCode.CONFIG,
        "The bucket in the config does not exist",
        "config set bucket NAME; or have `up` create one: pulumi config set bucket create",
    ),
    # mludvig/gcp-ethereum-miner 1
    "a mistyped project": (
        "Error creating Network: googleapi: Error 404: The resource 'projects/acme-labb' was not "
        "found, notFound",
        ExitCode.CONFIG,
        "The project was not found, or this login has no access",
        "List your projects: gcloud projects list; then: pulumi config set project ID",
    ),
    # midl-dev/tezos-on-gke 7
    "a project that is gone": (
        "Error creating GlobalAddress: googleapi: Error 403: Project 100842 is not found and "
        "cannot be used for API calls. If it is recently created, enable Compute Engine API by "
        "visiting https://console.developers.google.com/apis/api/compute.googleapis.com/overview"
        "?project=100842 then retry., accessNotConfigured",
        ExitCode.CONFIG,
        "The project was not found",
        "pulumi config set project ID",
    ),
    # hashicorp/terraform 18265
    "no actAs": (
        "Error creating instance: googleapi: Error 400: The user does not have access to service "
        "account 'dev-nodes@acme-lab.iam.gserviceaccount.com'.  User: 'ann@example.com'.  Ask a "
        "project owner to grant you the iam.serviceAccountUser role on the service account, "
        "badRequest",
        ExitCode.AUTH,
        "You cannot start machines that run as this account",
        "--role=roles/iam.serviceAccountUser",
    ),
    # dora-team/fourkeys 459
    "no actAs, newer": (
        "Error creating instance: googleapi: Error 403: Permission 'iam.serviceaccounts.actAs' "
        "denied on service account dev-nodes@acme-lab.iam.gserviceaccount.com (or it may not "
        "exist)., forbidden",
        ExitCode.AUTH,
        "You cannot start machines that run as this account",
        "--role=roles/iam.serviceAccountUser",
    ),
    "an account that is not everywhere yet": (
        "Error creating instance: googleapi: Error 400: The resource "
        "'dev-nodes@acme-lab.iam.gserviceaccount.com' of type 'serviceAccount' was not found., "
        "badRequest",
        ExitCode.PREFLIGHT,
        "The new service account is not yet known to all of Google Cloud",
        "Repeat the command",
    ),
    # hashicorp/terraform-provider-google 18087
    "an account that cannot be read yet": (
        "Error creating service account: googleapi: Error 404: Service account "
        "projects/acme-lab/serviceAccounts/dev-nodes@acme-lab.iam.gserviceaccount.com does not "
        "exist., notFound",
        ExitCode.PREFLIGHT,
        "The new service account is not yet known to all of Google Cloud",
        "Repeat the command",
    ),
    # GoogleCloudPlatform/terraform-google-three-tier-web-app 167
    "a hidden user of the network": (
        "Error waiting for Deleting Network: The network resource "
        "'projects/acme-lab/global/networks/dev-network' is already being used by "
        "'projects/acme-lab/global/firewalls/aet-europewest9-connecteurdesktop-egrfw'",
        ExitCode.CONFIG,
        "The stack did not create aet-europewest9-connecteurdesktop-egrfw (firewalls)",
        "If no command lists the resource, a Google service",
    ),
    # googleapis/google-auth-library-python 1459
    "no quota project": (
        "googleapi: Error 403: Your application is authenticating by using local Application "
        "Default Credentials. The cloudkms.googleapis.com API requires a quota project, which is "
        "not set by default. To learn how to set your quota project, see "
        "https://cloud.google.com/docs/authentication/adc-troubleshooting/user-creds . Details: "
        '[{"reason": "SERVICE_DISABLED"}]',
        ExitCode.AUTH,
        "The login has no quota project",
        "gcloud auth application-default set-quota-project PROJECT",
    ),
    # GoogleCloudPlatform/php-docs-samples 1235, java-docs-samples 276
    "no billing": (
        "Error creating Network: googleapi: Error 403: This API method requires billing to be "
        "enabled. Please enable billing on project #1051023892108 by visiting "
        "https://console.developers.google.com/billing/enable?project=1051023892108 then retry.",
        ExitCode.AUTH,
        "The project has no open billing account",
        "gcloud billing projects link 1051023892108 --billing-account=ACCOUNT",
    ),
    "billing disabled": (
        "googleapi: Error 403: Project acme-lab (#808448574146) has billing disabled. Please "
        "enable it., forbidden",
        ExitCode.AUTH,
        "no open billing account",
        "(list your accounts: gcloud billing accounts list)",
    ),
    # GoogleCloudPlatform/pubsec-declarative-toolkit 837
    "restrictCloudNATUsage": (
        "Error creating RouterNat: googleapi: Error 412: Constraint "
        "constraints/compute.restrictCloudNATUsage violated for projects/acme-lab. "
        "projects/acme-lab/regions/us-central1/subnetworks/dev-subnet is not allowed to use Cloud "
        "NAT., conditionNotMet",
        ExitCode.AUTH,
        "An organization policy forbids this change",
        "pulumi config set egress none",
    ),
    # fortinet/fortigate-terraform-deploy 34
    "requireShieldedVm": (
        "Error creating instance: googleapi: Error 412: Constraint "
        "constraints/compute.requireShieldedVm violated for project projects/acme-lab. The boot "
        "disk's 'initialize_params.source_image' field specifies a non-Shielded image: "
        "projects/acme-lab/global/images/mine. See https://cloud.google.com/resource-manager/docs/"
        "organization-policy/org-policy-constraints for more information., conditionNotMet",
        ExitCode.AUTH,
        "An organization policy forbids this change",
        "an image with the feature UEFI_COMPATIBLE",
    ),
    # GoogleCloudPlatform/compute-image-import 173
    "restrictNonCmekServices": (
        "googleapi: Error 412: Constraint constraints/gcp.restrictNonCmekServices violated for "
        "project acme-lab attempting to create a resource not protected by CMEK crypto key",
        ExitCode.AUTH,
        "An organization policy forbids this change",
        "pulumi config set kmsKey NAME",
    ),
    # cloudfoundry/bosh-bootloader 513
    "resourceLocations": (
        "googleapi: Error 412: Location us violates constraint constraints/gcp.resourceLocations "
        "on the resource projects/acme-lab/global/images/mine., conditionNotMet",
        ExitCode.AUTH,
        "An organization policy forbids this change",
        "pulumi config set region REGION, and zones of that region",
    ),
    # GoogleCloudPlatform/compute-image-tools 1834
    "vmExternalIpAccess": (
        "Error creating instance: googleapi: Error 412: Constraint "
        "constraints/compute.vmExternalIpAccess violated for project 972128462598. Add instance "
        "projects/acme-lab/zones/us-central1-a/instances/dev-node-0 to the constraint to use "
        "external IP with it., conditionNotMet",
        ExitCode.AUTH,
        "An organization policy forbids this change",
        "pulumi config set accessMode iap",
    ),
    "trustedImageProjects": (
        "Error creating instance: googleapi: Error 412: Constraint "
        "constraints/compute.trustedImageProjects violated for project acme-lab. Use of images "
        "from project ubuntu-os-cloud is prohibited., conditionNotMet",
        ExitCode.AUTH,
        "An organization policy forbids this change",
        "use an image from an allowed project: pulumi config set image NAME",
    ),
    "a policy without another way": (
        "googleapi: Error 412: Constraint constraints/compute.restrictLoadBalancerCreation "
        "violated for projects/acme-lab., conditionNotMet",
        ExitCode.AUTH,
        "An organization policy forbids this change",
        "Request an exception for this project from the organization's administrators",
    ),
    # GoogleCloudPlatform/genai-for-marketing 139
    "allowedPolicyMemberDomains": (
        'Error applying IAM policy for storage bucket "b/acme-results": googleapi: Error 400: One '
        "or more users named in the policy do not belong to a permitted customer,  perhaps due to "
        "an organization policy.",
        ExitCode.AUTH,
        "iam.allowedPolicyMemberDomains forbids this change",
        "pulumi config set bucket none",
    ),
    # terraform-google-modules/terraform-example-foundation 974
    "VPC Service Controls": (
        'Error when reading or editing Service Account "projects/acme-lab/serviceAccounts/dev": '
        "googleapi: Error 403: Request is prohibited by organization's policy. "
        "vpcServiceControlsUniqueIdentifier: VQQnKfXtZ16NHnOmdJAy0E92tVT Details: "
        '[{"type": "VPC_SERVICE_CONTROLS"}, {"reason": "SECURITY_POLICY_VIOLATED"}], forbidden',
        ExitCode.AUTH,
        "A perimeter of VPC Service Controls blocks requests from this machine; a role",
        "request an ingress rule from the organization's administrators",
    ),
    # hashicorp/terraform-provider-google 1211
    "deletionProtection": (
        "Cannot delete instance dev-node-0: instance Deletion Protection is enabled. Set "
        'deletion_protection to false for this resource and run "terraform apply" before '
        "attempting to delete it.",
        ExitCode.CONFIG,
        "deletion protection is on",
        "gcloud compute instances update dev-node-0 --no-deletion-protection",
    ),
    # googleapis/google-cloud-go 1787
    "a key of another region": (
        "googleapi: Error 400: Cloud KMS region 'global' not available for use with GCS region "
        "'US-CENTRAL1'., invalid",
        ExitCode.CONFIG,
        "The key must be in the cluster's region",
        "pulumi config set kmsKey NAME",
    ),
    "a key that is disabled": (
        "Error creating instance: googleapi: Error 400: Cloud KMS error when using key "
        "projects/acme-lab/locations/us-central1/keyRings/r/cryptoKeys/k/cryptoKeyVersions/1: "
        "projects/acme-lab/locations/us-central1/keyRings/r/cryptoKeys/k/cryptoKeyVersions/1 is "
        "not enabled, current state is: DISABLED., kmsPermissionDenied",
        ExitCode.CONFIG,
        "The key in kmsKey is DISABLED",
        "or use another key: pulumi config set kmsKey NAME",
    ),
    # dstackai/dstack 2586
    "a placement's limit": (
        "Error waiting for instance to create: No more than 22 instances of machine type "
        "c3-highmem-8 can be created with this policy.",
        ExitCode.CONFIG,
        "Google places at most 22 machines of c3-highmem-8 close together",
        "pulumi config set compactPlacement false",
    ),
    # gravitational/teleport 43219
    "a fingerprint": (
        "Error updating metadata: googleapi: Error 412: Supplied fingerprint does not match "
        "current metadata fingerprint., conditionNotMet",
        ExitCode.CONFIG,
        "The resource was changed by another user or program at the same time",
        "Repeat the command",
    ),
    "x509": (
        'Error creating Network: Post "https://compute.googleapis.com/compute/v1/projects/acme-lab'
        '/global/networks?alt=json": tls: failed to verify certificate: x509: certificate signed '
        "by unknown authority",
        ExitCode.PREFLIGHT,
        "A proxy or firewall replaces Google's certificate with its own",
        "export SSL_CERT_FILE=FILE REQUESTS_CA_BUNDLE=FILE",
    ),
    "a proxy that wants a login": (
        'Error creating Network: Post "https://oauth2.googleapis.com/token": proxyconnect tcp: '
        "Proxy Authentication Required",
        ExitCode.PREFLIGHT,
        "The proxy refuses this request",
        "export https_proxy=http://USER:PASSWORD@HOST:PORT",
    ),
    # golang.org/x/oauth2/google, default.go
    "a missing file of credentials": (
        "google: error getting credentials using GOOGLE_APPLICATION_CREDENTIALS environment "
        "variable: open /srv/key.json: no such file or directory",
        ExitCode.AUTH,
        "GOOGLE_APPLICATION_CREDENTIALS is set to a file that cannot be read",
        "or unset it and log in",
    ),
    # docker-archive/infrakit.gcp 1
    "an image that is gone": (
        "Error creating instance: googleapi: Error 400: Invalid value for field "
        "'resource.disks[0].initializeParams.sourceImage': 'https://compute.googleapis.com/compute"
        "/v1/projects/acme-lab/global/images/gone'. The referenced image resource cannot be "
        "found., invalid",
        ExitCode.CONFIG,
        "The image was not found, or this login has no access",
        "gcloud compute images list; then: pulumi config set image NAME",
    ),
    # spinnaker/spinnaker.io 247
    "an image whose project is gone": (
        "Error creating instance: googleapi: Error 400: Invalid value for field "
        "'resource.disks[0].initializeParams.sourceImage': 'https://compute.googleapis.com/compute"
        "/v1/projects/marketplace-spinnaker-release/global/images/spinnaker-codelab'. The project "
        "'marketplace-spinnaker-release' was not found., invalid",
        ExitCode.CONFIG,
        "The image was not found, or this login has no access",
        "gcloud compute images list; then: pulumi config set image NAME",
    ),
    "a rate limit": (
        "Error creating Firewall: googleapi: Error 403: Quota exceeded for quota metric 'Queries' "
        "and limit 'Queries per minute' of service 'compute.googleapis.com' for consumer "
        "'project_number:1'., rateLimitExceeded",
        ExitCode.PREFLIGHT,
        "Google limits requests per minute",
        "Repeat the command in a minute",
    ),
    "a token that has expired": (
        "googleapi: Error 401: Request had invalid authentication credentials. Expected OAuth 2 "
        "access token, login cookie or other valid authentication credential., authError",
        ExitCode.AUTH,
        "Google rejected the credentials (application default): the login has expired or was",
        "Log in: gcloud auth application-default login",
    ),
    "a session that has ended": (
        'Error creating Network: Post "https://compute.googleapis.com/compute/v1/projects/p/global/'
        'networks?alt=json": oauth2: cannot fetch token: 400 Bad Request Response: { "error": '
        '"invalid_grant", "error_description": "reauth related error (rapt_required)" }',
        ExitCode.AUTH,
        "the login has expired or was revoked",
        "gcloud auth application-default login",
    ),
    "a refusal of the credentials that names a permission": (
        'Error when reading or editing Storage Bucket "b-1": googleapi: Error 401: Anonymous '
        "caller does not have storage.buckets.get access to the Google Cloud Storage bucket. "
        "Permission 'storage.buckets.get' denied on resource (or it may not exist)., required",
        ExitCode.AUTH,
        "Google rejected the credentials",
        "gcloud auth application-default login",
    ),
    "a 401 that is no document": (
        "googleapi: got HTTP response code 401 with body: <html>",
        ExitCode.AUTH,
        "Google rejected the credentials",
        "gcloud auth application-default login",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_has_its_exit_code_its_cause_and_its_fix(case: str) -> None:
    said, code, cause, fix = CASES[case]
    error = explain(failed(f"1 error occurred:\n\t* {said}\n\n"))
    message = str(error)
    assert error.exit_code == code
    assert cause in message and fix in message
    # Google's message precedes the fix.
    assert message.startswith(f"pulumi up: {said[:40]}") and message.index(fix) > 40
    assert "\n" not in message and "Request the roles" not in message.replace(fix, "")


def test_the_advice_for_a_network_in_use_does_not_lead_back_to_the_command() -> None:
    said, *_ = CASES["a hidden user of the network"]
    assert "orchestrate down" not in str(explain(failed(said)))


def test_a_project_is_named_in_the_fix_where_the_text_names_one() -> None:
    said = "googleapi: Error 403: Required 'compute.networks.create' permission for "
    message = str(explain(failed(f"{said}'projects/acme-lab/global/networks/dev', forbidden")))
    assert "gcloud projects add-iam-policy-binding acme-lab --member" in message


@pytest.mark.processes
def test_down_by_somebody_who_may_not_delete_the_account_goes_on_to_the_sweep(
    site: Site, capsys: Capture
) -> None:
    site.build()
    own_key(site)
    said = (
        "error: Error deleting service account projects/acme-lab/serviceAccounts/mine: googleapi: "
        f"Error 403: Permission 'iam.serviceAccounts.delete' {_DENIED}"
    )
    site.pulumi.on("destroy", out=said, status=255)
    assert main(["down", "--yes", "--without-collect"], site.env) == ExitCode.TEARDOWN
    err = capsys.readouterr().err
    assert "Traceback" not in err and "3/3 sweep" in err
    assert "iam.serviceAccounts.delete is in roles/iam.serviceAccountAdmin" in err
